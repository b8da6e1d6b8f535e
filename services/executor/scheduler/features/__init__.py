"""What features bring to the steps of a ring; `catalog.py` lists them. None imports another."""
