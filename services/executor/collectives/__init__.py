"""Collectives among the ranks of a group: NCCL, gloo, shared and symmetric memory."""
