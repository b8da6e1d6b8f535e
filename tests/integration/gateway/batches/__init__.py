"""Files and batches of a gateway on a real NATS."""
