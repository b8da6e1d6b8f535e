"""Kernels in C for CPUs, and the way to them.

    library    finds and describes the compiled library; says why it cannot be used
    packed     weights in the order in which the kernels read them
    lowering   which models the kernels can run, and what they need of them
    decoder    a rank's forward pass

A model that cannot be lowered, and a machine without the kernels, run through PyTorch: slower, and equal.
"""
