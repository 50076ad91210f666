"""What a notebook does first on Colab or Kaggle: `bootstrap.py NUMBER [imported modules]`.

It stands on nothing but Python and `packaging`, which every image has. It installs what this lesson lacks,
and of what the image brings it changes as little as can be: nothing if pip finds a way, else only
packages that the course asks for by name, and never those that the image's own kernel stands on.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from course.notebooks import code_cells, inputs, select
from utils.errors import ROOT

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


def requirements() -> dict[str, str]:
    """What the course asks for, by name: `{"torch": "torch>=2.11"}`."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    return {
        canonicalize_name(Requirement(text).name): text for text in texts if text
    }


def installed() -> Versions:
    """Every package of this interpreter, with its version."""
    versions: Versions = {}
    for package in metadata.distributions():
        name = canonicalize_name(package.name or "")
        # The first on the path is the one that is imported.
        versions.setdefault(name, package.version)
    return versions


def imports(path: Path) -> set[str]:
    """The modules that a notebook or a file imports, anywhere in its code."""
    notebook = path.suffix == ".ipynb"
    codes = code_cells(path) if notebook else [path.read_text(encoding="utf-8")]
    names = set()
    for code in codes:
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
    packages: set[str] = set()
    todo = list(paths)
    for path in todo:
        for name in imports(path):
            ours = ROOT / (name.replace(".", "/") + ".py")
            if ours.exists() and ours not in todo:
                todo.append(ours)
            top = name.partition(".")[0]
            package = BROUGHT_BY.get(name) or BROUGHT_BY.get(top, top)
            packages.add(canonicalize_name(package))
    return packages & known.keys()


def chain_of(path: Path) -> list[Path]:
    """The lessons that make what a lesson takes, and what those take, in reading order."""
    todo = [path]
    for lesson in todo:
        todo += [maker for maker in inputs(lesson).values() if maker not in todo]
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


def prepare(wanted: list[str], before: Versions) -> None:
    """Install what is wanted, and take away a torchao that peft refuses."""
    install(wanted, before)
    if "torchao" in before and is_older(before["torchao"], OLDEST_TORCHAO):
        pip("uninstall", "--yes", "torchao")


def refuse_torch(before: Versions) -> None:
    """Stop at once where the image's torch cannot be used."""
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
    path = select(number)[0]
    makers = chain_of(path)
    chain = [maker.name[:2] for maker in makers]
    files = [*makers, path]
    files.append(ROOT / "course" / "fetch.py")
    if chain:
        files += [ROOT / "course" / "runner.py", ROOT / "course" / "execute.py"]
    wanted = requirements()
    names = sorted(packages_for(files) - IMAGE)
    prepare([wanted[name] for name in names], before)
    tell(before, imported)
    command = [sys.executable, "-m", "course", "fetch"]
    command += ["--for", ",".join([*chain, number])]
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit("the lesson's data could not be fetched; the reason stands above")
    tell_time(chain)


def is_older(version: str, other: str) -> bool:
    """Whether a version comes before another."""
    return Version(version) < Version(other)


if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
