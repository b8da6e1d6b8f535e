"""Placement: which group gets a request, in what order, in what batch."""
