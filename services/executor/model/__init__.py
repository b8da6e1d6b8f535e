"""Transformers' model code under our own parallel layers, loader and attention."""
