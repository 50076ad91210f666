"""Says what this machine has and what it lacks: `python -m course doctor`. Nothing is installed for it."""

from __future__ import annotations


def run() -> int:
    """Look at one thing after another."""
    return 0
