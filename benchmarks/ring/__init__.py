"""What a second rank gains and what it costs: `python -m benchmarks.ring --help`."""
