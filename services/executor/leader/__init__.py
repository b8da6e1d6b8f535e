"""Rank 0's event loop: takes requests from NATS, runs the steps, publishes the tokens."""
