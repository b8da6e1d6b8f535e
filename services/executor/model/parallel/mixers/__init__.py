"""Modules that keep state in slots: how they are split over the ranks, and what computes in their place."""
