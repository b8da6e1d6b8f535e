"""Grammar-constrained decoding: which tokens may follow (ADR 0013)."""
