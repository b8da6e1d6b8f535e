"""What every service process has: life cycle, HTTP server, logs and metrics."""
