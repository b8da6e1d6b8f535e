"""The decoder for CPUs, over the native kernels."""
