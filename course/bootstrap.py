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


def missing(lines: list[str]) -> list[str]:
    """The requirements that this Python does not meet.

    >>> missing(["pip>=1  # here", "no-such-package>=2", "-e ."])
    ['no-such-package>=2']
    """
    from packaging.requirements import Requirement

    unmet = []
    for line in lines:
        text = line.split("#")[0].strip()
        if not text or text.startswith("-"):
            continue
        need = Requirement(text)
        try:
            met = need.specifier.contains(
                metadata.version(need.name), prereleases=True
            )
        except metadata.PackageNotFoundError:
            met = False
        if met:
            continue
        if need.name in IMAGE:
            print(
                f"this image keeps its own {need.name}; the course is tested with {text}"
            )
        else:
            unmet.append(text)
    return unmet


def pip(*arguments: str) -> None:
    """Run this interpreter's pip, quietly."""
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q"], check=True)


def main(number: str) -> None:
    """Install what is missing, then fetch the assets of one lesson."""
    from packaging.version import Version

    unmet = missing(
        (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    )
    if unmet:
        pip("install", *unmet)
    try:
        if Version(metadata.version("torchao")) < Version("0.17"):
            pip("uninstall", "-y", "torchao")
    except metadata.PackageNotFoundError:
        pass
    subprocess.run(
        [sys.executable, "-m", "course", "fetch", "--for", number],
        cwd=ROOT,
        check=True,
    )
    print("ready")
    if unmet:
        print(
            "restart the runtime if one of these was already imported:",
            ", ".join(unmet),
        )


if __name__ == "__main__":
    main(sys.argv[1])
