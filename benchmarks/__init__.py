"""Side by side against named peers; `python -m benchmarks` runs every comparison."""
