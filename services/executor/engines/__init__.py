"""Engines that schedule for themselves, as executor groups."""
