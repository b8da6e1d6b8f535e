"""What becomes of a generation: its state, its record, who owns it, and what is done when something is lost."""
