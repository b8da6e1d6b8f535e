"""One rank: its share of the model, what computes a step, and the engine that the leader asks."""
