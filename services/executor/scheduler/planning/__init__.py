"""Which tokens of which sequences the next step computes, and the one behind it."""
