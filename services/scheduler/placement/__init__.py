"""Placement: the choice of a group, and the scheduler's view of the groups."""
