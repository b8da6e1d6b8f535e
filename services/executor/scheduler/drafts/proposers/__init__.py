"""Proposers of draft tokens; `catalog.py` lists them. None imports another."""
