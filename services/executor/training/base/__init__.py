"""The frozen base of a model that is trained: its weights where serving keeps them, and what computes with them."""
