"""The APIs that the gateway speaks, a room each, and the list of them."""
