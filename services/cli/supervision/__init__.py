"""The local stack: NATS and every service as a process of its own, started, watched and stopped."""
