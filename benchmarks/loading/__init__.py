"""How fast ranks load a model from the page cache: `python -m benchmarks.loading --help`."""
