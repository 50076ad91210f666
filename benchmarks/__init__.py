"""Side by side against named peers: each module has `rows()`, `python -m benchmarks` runs them all."""
