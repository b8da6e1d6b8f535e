"""The edge: HTTP and WebSocket in, token streams out. Owns a request's life from end to end."""
