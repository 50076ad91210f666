"""The machine that fetches, runs, checks and reports; a learner never opens it."""
