"""The requests that wait, and whose turn it is."""
