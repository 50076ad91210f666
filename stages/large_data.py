"""The data of a large run: text of packages or of the hub, cleaned, a tokenizer, and its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages import corpus, large_figures
from stages.recipe import Recipe
from stages.sources import Tree, blob_id, environment, folder_tree, wheel_tree
from stages.tokenizer import train_bpe
from stages.tokens import Texts, write_store
from utils.artifacts import Facts, read_json, write_json
from utils.errors import CourseError

# The hub's cleaned files of GitHub, streamed: `datasets.load_dataset(**HUB)`.
HUB = {"path": "codeparrot/codeparrot-clean", "split": "train", "streaming": True}
# Megabytes of text that a tokenizer learns from: more costs memory and changes little.
LEARNED_FROM = 300


@dataclass(frozen=True)
class Job:
    """A large run: what is trained, of which text, and where it lies."""

    name: str
    recipe: Recipe
    source: str
    packages: list[str]
    folder: Path
    command: str

    @property
    def own(self) -> bool:
        """Whether the tokens are the reader's own, and no data step is taken."""
        return self.source == "own tokens"

    def place(self, name: str) -> Path:
        """The folder of a step's result."""
        theirs = ("tokens", "tokenizer")
        if self.own and name in theirs:
            return self.recipe.place(name)
        return self.folder / name


def list_packages(path: Path) -> list[str]:
    """The names in a file of packages."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        what = f"the list of packages cannot be read: {error}"
        raise CourseError(what, path, "a text file, one name a line") from error
    names = []
    for line in lines:
        name, _, _ = line.partition("#")
        names.append(name.strip())
    return [name for name in names if name]


def place_of(package: str) -> str:
    """The step that fetches a package, and its folder.

    >>> place_of("attrs==26.1.0")
    'sources/attrs'
    """
    return f"sources/{package.partition('==')[0]}"


def fetch_source(package: str, job: Job, folder: Path) -> None:
    """The source of a package, and its licence as its metadata name it."""
    tree = wheel_tree(package, folder)
    for archive in folder.glob("*.whl"):
        archive.unlink()
    write_json(folder / "licence.json", tree.licence)


def fetched_trees(job: Job) -> list[Tree]:
    """What `fetch_source` has left of all packages."""
    trees = []
    for package in job.packages:
        place = job.place(place_of(package))
        licence = read_json(place / "licence.json")
        trees.append(folder_tree(place, place.name, licence))
    return trees


def small_trees(job: Job) -> list[Tree]:
    """About two megabytes of small packages of the environment, by name: no network is needed."""
    trees = []
    room = large_figures.SOURCES["environment"][0]
    for tree in environment():
        if 10_000 < tree.size < min(300_000, room):
            trees.append(tree)
            room -= tree.size
    return trees


def hub_rows(rows: Iterable[Any]) -> Iterator[Facts]:
    """Rows of `codeparrot-clean` with the columns of a corpus; all its numbers are texts."""
    for row in rows:
        text = row["content"]
        data = text.encode()
        yield {
            "content": text,
            "path": row["path"],
            "package": row["repo_name"].lower(),
            "license": row["license"],
            "size": len(data),
            "hash": blob_id(data),
            "copies": int(row["copies"]),
        }


def make_corpus(job: Job, folder: Path) -> None:
    """Clean, deduplicate and split the text of the source."""
    if job.source == "codeparrot-clean":
        from datasets import load_dataset

        report = corpus.build_from_rows(hub_rows(load_dataset(**HUB)), folder)
    else:
        find = small_trees if job.source == "environment" else fetched_trees
        trees = find(job)
        report = corpus.build(trees, folder)
    write_json(folder / "report.json", report)
    print(
        f"  {report['kept']:,} of {report['seen']:,} files kept, {report['bytes'] / 1e6:,.1f} MB"
    )


def make_tokenizer(job: Job, folder: Path) -> None:
    """Learn the vocabulary from a sample of the training text."""
    texts = corpus.read_texts(job.place("corpus"), "train", LEARNED_FROM)
    size = job.recipe.vocabulary or 0
    tokenizer = train_bpe(texts, size)
    tokenizer.save_pretrained(folder)


def make_tokens(job: Job, folder: Path) -> None:
    """Encode the corpus into blocks."""
    place = job.place("corpus")
    splits: Texts = {}
    for name in corpus.SPLITS:
        splits[name] = corpus.read_texts(place, name)
    tokenizer = large_figures.load_tokenizer(job.place("tokenizer"))
    recipe = job.recipe
    block = recipe.block or 0
    header = write_store(folder, splits, tokenizer, block)
    print(
        f"  {header['splits']['train']['tokens'] / 1e6:,.2f} M tokens to train on"
    )
