"""Models over HTTP: the list with their status, loading and unloading, the registry."""
