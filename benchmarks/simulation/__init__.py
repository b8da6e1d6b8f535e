"""Placement at the scale of a large cluster, in virtual time: `python -m benchmarks.simulation --help`."""
