"""The gRPC API: HTTP/2 and gRPC's framing, and the service on it (protos/ryzanstein/v1)."""
