"""C kernels for CPUs, and their Python bindings.

`library.py` finds and describes the compiled library, and says why it cannot be used. What calls it: `cpu/` (packed
weights, a rank's forward pass); which models it can run: `model/lowering.py`. A model that cannot be lowered, and a
machine without the kernels, run through PyTorch: slower, and equal.
"""
