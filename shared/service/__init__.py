"""What every service process has: its life, its HTTP server, logs and metrics."""
