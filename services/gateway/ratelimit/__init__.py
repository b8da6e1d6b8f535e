"""Limits per key and tenant, held by all gateways together."""
