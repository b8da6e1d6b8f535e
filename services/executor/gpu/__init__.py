"""The decoder for GPUs, its Triton kernels and CUDA graphs (docs/adr/0020-gpu-decoder.md)."""
