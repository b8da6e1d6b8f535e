"""Kinds of state that layers keep beside keys and values of every token, or in their place; `catalog.py` lists them."""
