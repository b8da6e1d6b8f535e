"""Kernels for GPUs, in Triton. With TRITON_INTERPRET=1 they run on CPU tensors, as tests do."""
