"""Models on this machine: where they come from, how they are fetched, what is there."""
