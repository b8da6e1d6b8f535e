"""The fair queue of waiting requests."""
