"""What Triton's compiler makes of the kernels: `python -m benchmarks.on_gpu.compiled`."""
