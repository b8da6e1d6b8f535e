"""NATS: the connection, subjects, streams, buckets, object stores, and the rights of each user."""
