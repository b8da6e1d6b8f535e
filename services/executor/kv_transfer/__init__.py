"""KV blocks on their way from a group that leaves to its peers."""
