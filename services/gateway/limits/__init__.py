"""Limits per key and tenant, kept together by all gateways: requests and tokens per minute, generations at once."""
