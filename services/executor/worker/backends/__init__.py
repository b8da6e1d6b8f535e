"""Rooms of what computes a rank's steps; `catalog.py` lists them. None imports another."""
