"""The commands of `ryzanstein`, one module for each."""
