"""The process that starts a group's ranks, watches them, and restarts them."""
