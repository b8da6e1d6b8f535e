"""The transfer of KV blocks from a draining group to its peers."""
