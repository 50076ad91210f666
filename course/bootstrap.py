"""Floor 0: what a notebook does first on Colab or Kaggle: installs what is missing, nothing else.

Run as a program, before anything of the course can be imported. The image keeps its own torch and
numpy; a torchao too old for peft, which makes every LoRA fail, is removed.
"""
from __future__ import annotations

import importlib.metadata as metadata
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEEP = {"torch", "numpy", "ipykernel", "jupyterlab"}


def missing(lines: list[str]) -> list[str]:
    """The requirements that this Python does not meet.

    >>> missing(["pip>=1  # here", "no-such-package>=2", "-e ."])
    ['no-such-package>=2']
    """
    from packaging.requirements import Requirement

    wanted = []
    for line in lines:
        text = line.split("#")[0].strip()
        if not text or text.startswith("-"):
            continue
        need = Requirement(text)
        try:
            met = need.specifier.contains(metadata.version(need.name), prereleases=True)
        except metadata.PackageNotFoundError:
            met = False
        if not met and need.name not in KEEP:
            wanted.append(text)
    return wanted


def pip(*arguments: str) -> None:
    """Run this interpreter's pip, quietly."""
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q"], check=True)


def main(number: str) -> None:
    """Install what is missing, then fetch the assets of one lesson."""
    wanted = missing((ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines())
    if wanted:
        pip("install", *wanted)
    try:
        if tuple(map(int, re.findall(r"\d+", metadata.version("torchao"))[:2])) <= (0, 16):
            pip("uninstall", "-y", "torchao")
    except metadata.PackageNotFoundError:
        pass
    subprocess.run([sys.executable, "-m", "course", "fetch", "--for", number], cwd=ROOT, check=True)
    print("ready" + (": restart the runtime if something above was already imported" if wanted else ""))


if __name__ == "__main__":
    main(sys.argv[1])
