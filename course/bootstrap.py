"""What a notebook does first on Colab or Kaggle: `bootstrap.py NUMBER [imported modules]`.

Run as a program, before anything of the course can be imported. It installs what this lesson lacks,
and of what the image brings it changes as little as can be: nothing if pip finds a way, else only
packages that the course asks for by name, and never those that the image's own kernel stands on.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The driver and the kernel of the image go with these.
IMAGE = {"torch", "numpy", "ipykernel", "ipython", "ipywidgets", "jupyter-client"}
# peft refuses to make an adapter beside an older one.
OLDEST_TORCHAO = "0.17"
# Modules that a package of another name brings.
BROUGHT_BY = {
    "IPython": "ipython",
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
    "torch.utils.tensorboard": "tensorboard",
    "yaml": "pyyaml",
}
Versions = dict[str, str]


def package_name(text: str) -> str:
    """A name as pip compares it.

    >>> package_name("Jupyter_Client>=7.4")
    'jupyter-client'
    """
    name = re.split(r"[^\w.-]", text)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> dict[str, str]:
    """What the course asks for, by name: `{"torch": "torch>=2.11"}`."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    return {package_name(text): text for text in texts if text}


def installed() -> Versions:
    """Every package of this interpreter, with its version."""
    versions: Versions = {}
    for package in metadata.distributions():
        name = package_name(package.name or "")
        # The first on the path is the one that is imported.
        versions.setdefault(name, package.version)
    return versions


def sources(path: Path) -> list[str]:
    """The Python of a notebook or of a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return [text]
    cells = json.loads(text)["cells"]
    codes = [
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"
    ]
    return [re.sub(r"(?m)^\s*[%!].*$", "pass", code) for code in codes]


def imports(path: Path) -> set[str]:
    """The modules that a notebook or a file imports, anywhere in its code."""
    names = set()
    for code in sources(path):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def packages_for(paths: list[Path]) -> set[str]:
    """The packages of requirements.txt that these files import, or a file of ours that they import."""
    known = requirements()
    packages = set()
    todo = list(paths)
    for path in todo:
        for name in imports(path):
            ours = ROOT / (name.replace(".", "/") + ".py")
            if ours.exists() and ours not in todo:
                todo.append(ours)
            top = name.partition(".")[0]
            package = BROUGHT_BY.get(name) or BROUGHT_BY.get(top, top)
            packages.add(package_name(package))
    return packages & known.keys()


def lesson_file(number: str) -> Path:
    """The notebook of a lesson."""
    return next((ROOT / "notebooks").glob(f"{number}_*.ipynb"))


def makers(number: str) -> list[str]:
    """The lessons that make what a lesson takes, and what those take, in reading order."""
    codes = {}
    published = {}
    for path in sorted((ROOT / "notebooks").glob("[0-9A][0-9]_*.ipynb")):
        lesson = path.name[:2]
        codes[lesson] = "\n".join(sources(path))
        for name in re.findall(r'\.publish\("([\w-]+)"', codes[lesson]):
            published[name] = lesson
    todo = [number]
    for lesson in todo:
        for name in re.findall(r'\.need\("([\w-]+)"', codes[lesson]):
            if published[name] not in todo:
                todo.append(published[name])
    return sorted(todo[1:])


def pip(*arguments: str) -> subprocess.CompletedProcess:
    """Run this interpreter's pip; what it says is shown only where it matters."""
    command = [sys.executable, "-m", "pip", *arguments]
    command += ["--quiet", "--disable-pip-version-check"]
    return subprocess.run(command, capture_output=True, text=True)


def install(wanted: list[str], before: Versions) -> None:
    """Install what is wanted with every package of the image as it is; only if that cannot be, with
    those that the course names free to change."""
    named = requirements().keys() - IMAGE
    for free in (set(), named):
        pins = [
            f"{name}=={now}" for name, now in before.items() if name not in free
        ]
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "image.txt"
            file.write_text("\n".join(pins), encoding="utf-8")
            done = pip("install", "-c", str(file), "--no-compile", *wanted)
        if done.returncode == 0:
            return
    message = done.stderr.strip().splitlines() or ["pip gave no reason"]
    problem = (
        "what this lesson needs cannot be installed beside this image's packages"
    )
    way = "a newer image may help: Runtime, Change runtime type, Runtime version"
    sys.exit(f"{problem}: {message[-1]}\n  next:  {way}")


def refuse_torch(before: Versions) -> None:
    """Stop at once where the image's torch cannot be used."""
    from packaging.requirements import Requirement

    needed = Requirement(requirements()["torch"])
    version = before.get("torch", "none")
    if version == "none" or not needed.specifier.contains(version):
        problem = f"this image has torch {version}; the course needs {needed}"
        way = "choose another image: Runtime, Change runtime type, Runtime version"
        sys.exit(f"{problem}\n  next:  {way}")


def tell(before: Versions, imported: set[str]) -> None:
    """Say what was installed, what was changed, and whether the kernel must start again."""
    after = installed()
    new = sorted(after.keys() - before.keys())
    changed = [name for name in before if after.get(name) != before[name]]
    if new:
        print("installed:", ", ".join(f"{name} {after[name]}" for name in new))
    for name in changed:
        print(f"changed: {name} {before[name]} → {after.get(name, 'removed')}")
    if not new and not changed:
        print("nothing was missing")
    old = [name for name in changed if name.replace("-", "_") in imported]
    if old:
        names = ", ".join(old)
        print(f"RESTART: {names} was in use before it changed.")
        print("Runtime, Restart session; then run this cell again.")


def tell_time(chain: list[str]) -> None:
    """Say what earlier lessons will cost, which are run when this one asks for what they make."""
    record = json.loads(
        (ROOT / "results" / "smoke.json").read_text(encoding="utf-8")
    )
    costs = record["notebooks"]
    seconds = sum(costs.get(number, {"seconds": 0})["seconds"] for number in chain)
    if chain:
        names = ", ".join(chain)
        print(
            f"This lesson takes what lessons {names} make. They run when it asks for it:"
        )
        print(
            f"about {seconds / 60:.0f} min at profile smoke, longer at a larger one."
        )


def main(number: str, imported: set[str]) -> None:
    """Install what one lesson lacks, fetch its assets, say what happened."""
    before = installed()
    refuse_torch(before)
    chain = makers(number)
    files = [lesson_file(lesson) for lesson in [*chain, number]]
    files.append(ROOT / "course" / "fetch.py")
    if chain:
        files += [ROOT / "course" / "runner.py", ROOT / "course" / "execute.py"]
    wanted = requirements()
    names = sorted(packages_for(files) - IMAGE)
    install([wanted[name] for name in names], before)
    if "torchao" in before and is_older(before["torchao"], OLDEST_TORCHAO):
        pip("uninstall", "--yes", "torchao")
    tell(before, imported)
    command = [sys.executable, "-m", "course", "fetch"]
    command += ["--for", ",".join([*chain, number])]
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit("the lesson's data could not be fetched; the reason stands above")
    tell_time(chain)


def is_older(version: str, other: str) -> bool:
    """Whether a version comes before another."""
    from packaging.version import Version

    return Version(version) < Version(other)


if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
