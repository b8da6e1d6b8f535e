"""The way to NATS: the connection, subjects, streams, buckets, object stores, and what each may be used by."""
