"""`ryzanstein doctor`: what this machine has, what of it serving uses, and what to do about the rest."""
