"""What is fixed in the race: the text, the budget, the seeds. docs/race.md explains it.

Whoever changes a line of this file makes another race: count `VERSION` up, and begin a new board.
"""

from __future__ import annotations

VERSION = 1
# CPU seconds of one run and of every process that it starts: ten minutes of two cores, nearly.
BUDGET = 1080.0
# The last step and the last save may pass the budget by this share.
GRACE = 0.01
SEEDS = (42, 43)

# The asset of that name, by the folders that its packages fill.
ASSET = "race-corpus"
PACKAGES = {
    "train": (
        "celery",
        "dask",
        "django",
        "networkx",
        "nltk",
        "sphinx",
        "sqlalchemy",
        "textual",
        "twisted",
    ),
    "validation": ("boltons", "luigi", "tox", "werkzeug"),
    "test": ("IPython", "_pytest", "pydantic", "jupyter_server"),
}
# Bytes of a file: less is a stub, more is a table.
SMALLEST, LARGEST = 1_000, 100_000
# What is judged: so many pieces of so many characters of a split.
PIECES, PIECE = 800, 768
# The hash of all texts of all splits. Without it two entries would not be of one race.
CORPUS = "a7dfa26322d677590de635559428605f74ea23fb8a1a257969f18c5d04809ec8"
