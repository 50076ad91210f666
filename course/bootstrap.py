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
        if text and not text.startswith("-"):
            need = Requirement(text)
            have = installed(need.name)
            if have and need.specifier.contains(have, prereleases=True):
                continue
            if need.name in IMAGE:
                note = f"the course is tested with {text}"
                print(f"this image keeps its own {need.name}; {note}")
            else:
                unmet.append(text)
    return unmet


def installed(name: str) -> str:
    """The version of a package here, or nothing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def pip(*arguments: str) -> None:
    """Run this interpreter's pip, quietly."""
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q"], check=True)


def main(number: str) -> None:
    """Install what is missing, then fetch the assets of one lesson."""
    from packaging.version import Version

    needs = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    unmet = missing(needs.splitlines())
    if unmet:
        pip("install", *unmet)
    torchao = installed("torchao")
    if torchao and Version(torchao) < Version("0.17"):
        pip("uninstall", "-y", "torchao")
    command = [sys.executable, "-m", "course", "fetch", "--for", number]
    subprocess.run(command, cwd=ROOT, check=True)
    print("ready")
    if unmet:
        note = "restart the runtime if one of these was already imported"
        print(f"{note}: {', '.join(unmet)}")


if __name__ == "__main__":
    main(sys.argv[1])
