"""Which Ryzanstein this is."""

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("ryzanstein")
    except PackageNotFoundError:  # run from a tree that was not installed
        return "0"


VERSION = _installed()
