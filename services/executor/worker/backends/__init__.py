"""Backends, which compute a rank's steps; `catalog.py` lists them. None imports another."""
