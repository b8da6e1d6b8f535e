"""A model of nats-server 2.15 at the wire: as much of it as shared/nats, the services and nats-py use."""
