"""The whole control plane in one process and in virtual time, under faults that a seed decides: `make simulate`."""
