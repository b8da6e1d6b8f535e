"""The APIs that the gateway speaks, a package each, and the list of them."""
