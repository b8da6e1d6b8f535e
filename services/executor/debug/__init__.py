"""Looking into a ring: what its ranks write down as they go, and how it is read when one of them hangs."""
