"""What a caged program can see: the interpreter's library, read-only, and nothing else.

Not the interpreter itself: it runs already, and no program in the cage may be executed.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig

from . import kernel

if sys.platform != "linux":
    raise ImportError("mounts are made for Linux")

# Every system has this folder, and no interpreter stands in it.
PLACE = "/proc"
SCRATCH = "/tmp"
NO_PACKAGES = ["site-packages", "dist-packages"]
SEALED = kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEVICES


def mapped_libraries() -> set[str]:
    """The shared libraries of this process, the loader among them."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        text = file.read()
    paths = re.findall(r"(/\S+\.so[.\d]*)$", text, re.MULTILINE)
    return set(paths)


def library_folders() -> list[str]:
    """The standard library's folders, of Python and of compiled modules."""
    names = ("stdlib", "platstdlib")
    folders = {os.path.realpath(sysconfig.get_path(name)) for name in names}
    compiled = sysconfig.get_config_var("DESTSHARED")
    if compiled and os.path.isdir(compiled):
        folders.add(os.path.realpath(compiled))
    return without_nested(folders)


def without_nested(paths: set[str]) -> list[str]:
    """The paths that stand in none of the others.

    >>> without_nested({"/a/b", "/a", "/ab"})
    ['/a', '/ab']
    """
    kept: list[str] = []
    for path in sorted(paths):
        inside = [one for one in kept if path.startswith(f"{one}/")]
        if not inside:
            kept.append(path)
    return kept


def visible_paths() -> list[str]:
    """Everything that is shown: the library, and the shared libraries that it has loaded."""
    return without_nested({*library_folders(), *mapped_libraries()})


def show(path: str) -> None:
    """Bind a file or folder into the view, under its own name."""
    target = PLACE + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w", encoding="utf-8").close()
    kernel.mount(path, target, "", kernel.BIND | kernel.RECURSIVE)
    kernel.restrict_mount(target, SEALED, deep=True)


def hide_packages(folder: str) -> None:
    """Cover the folders of installed packages in a library."""
    for name in NO_PACKAGES:
        target = f"{PLACE}{folder}/{name}"
        if os.path.isdir(target):
            kernel.mount("none", target, "tmpfs", SEALED, "size=4k,nr_inodes=2")


def enter_view() -> None:
    """Build the view on a small file system in memory, and make it the root."""
    paths, folders = visible_paths(), library_folders()
    kernel.mount("none", "/", "", kernel.RECURSIVE | kernel.PRIVATE)
    plain = kernel.NO_SUID | kernel.NO_DEVICES
    kernel.mount("view", PLACE, "tmpfs", plain, "size=1m,mode=755")
    os.mkdir(PLACE + SCRATCH)
    for path in paths:
        show(path)
    for folder in folders:
        hide_packages(folder)
    kernel.restrict_mount(PLACE, SEALED, deep=False)
    kernel.enter_root(PLACE)


def mount_scratch(megabytes: int) -> None:
    """An empty folder in memory that goes with the last process of its namespace."""
    flags = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC
    size = f"size={megabytes}m"
    options = f"{size},nr_inodes=1024,mode=700"
    kernel.mount("scratch", SCRATCH, "tmpfs", flags, options)
    os.chdir(SCRATCH)
