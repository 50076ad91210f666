"""What a notebook does first on Colab or Kaggle: installs what is missing, nothing else.

Run as a program, before anything of the course can be imported. The image keeps its own torch and
numpy; a torchao too old for peft, which makes every LoRA fail, is removed.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the image's own driver and kernel go with is not replaced.
IMAGE = {"torch", "numpy", "ipykernel", "jupyterlab"}


def wanted(lines: list[str]) -> list[str]:
    """The requirements that pip may see to.

    >>> wanted(["pip>=1  # here", "torch>=2", "", "-e ."])
    ['pip>=1']
    """
    texts = [line.split("#")[0].strip() for line in lines]
    found = []
    for text in texts:
        name = text.partition(">=")[0]
        if text and name not in IMAGE and not text.startswith("-"):
            found.append(text)
    return found


def pip(*arguments: str) -> None:
    """Run this interpreter's pip, quietly."""
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q"], check=True)


def main(number: str) -> None:
    """Install what is missing, then fetch the assets of one lesson."""
    from packaging.version import Version

    needs = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    pip("install", *wanted(needs.splitlines()))
    try:
        if Version(metadata.version("torchao")) < Version("0.17"):
            pip("uninstall", "-y", "torchao")
    except metadata.PackageNotFoundError:
        pass
    command = [sys.executable, "-m", "course", "fetch", "--for", number]
    subprocess.run(command, cwd=ROOT, check=True)
    print("ready; restart the runtime if pip has just said so")


if __name__ == "__main__":
    main(sys.argv[1])
