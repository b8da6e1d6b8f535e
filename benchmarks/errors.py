"""What stops a benchmark. What fails a single request is a figure of the report instead."""


class BenchError(Exception):
    """The run cannot start or go on; `str(error)` is one sentence for the user."""
