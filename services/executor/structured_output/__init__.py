"""Which tokens may follow, so that a text matches its grammar (ADR 0013)."""
