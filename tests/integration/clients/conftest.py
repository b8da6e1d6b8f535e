"""Gateways, as the tests of the gateway have them."""

from tests.integration.gateway.conftest import client, gateway, other, ring

__all__ = ["client", "gateway", "other", "ring"]
