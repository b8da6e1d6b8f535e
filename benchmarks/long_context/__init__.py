"""What a model still finds in long texts, dense and sparse: `python -m benchmarks.long_context --help`."""
