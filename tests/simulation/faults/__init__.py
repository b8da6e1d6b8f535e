"""Faults as data: what may go wrong, when and to whom. A schedule of them is drawn before a run, and is a value."""
