"""The gateway alone and its two APIs: `python -m benchmarks.gateway.grpc_rest --help` and its neighbours."""
