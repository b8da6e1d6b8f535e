"""Clients of the simulated gateways: each follows a plan that its seed draws, and records what it saw."""
