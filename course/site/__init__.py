"""The course as pages: `python -m course site` writes `build/site`, which opens without a server."""
