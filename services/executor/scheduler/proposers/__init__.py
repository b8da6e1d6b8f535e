"""Rooms of what proposes tokens; `catalog.py` lists them. None imports another."""
