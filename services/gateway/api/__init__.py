"""What clients see: REST, WebSocket, gRPC, the console."""
