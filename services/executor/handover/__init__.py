"""KV blocks of sessions from a ring that leaves to its peers (docs/adr/0018)."""
