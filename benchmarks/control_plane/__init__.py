"""What everything around the engine costs: `python -m benchmarks.control_plane --help`."""
