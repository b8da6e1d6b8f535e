"""Connections: HTTP/1.1, WebSocket and HTTP/2 with their limits, and certificates."""
