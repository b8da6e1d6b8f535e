"""Rate limits per key and tenant, shared by all gateways."""
