"""The engine alone, in this process (`python -m benchmarks.engine --help`), and a module for each question more."""
