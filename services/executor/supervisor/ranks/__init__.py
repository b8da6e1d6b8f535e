"""Processes of ranks, and the server that forks them."""
