"""The finished form of what the lessons build: one file for each arrow of the road."""
