"""A processor that runs PTX, as far as our kernels use it: one program at a time, all of its threads in step.

    text.py            a kernel's text ─▶ statements
    lanes.py           registers of all threads, as NumPy arrays of their bits
    memory.py          memory: what was not given to the kernel cannot be read or written, nor what is not aligned
    instructions.py    what a statement does             matrix.py   the same of matrix instructions
    machine.py         programs of a grid, one after the other

Source of all meanings: NVIDIA, "PTX ISA" 9.0, https://docs.nvidia.com/cuda/parallel-thread-execution; its sections are
named where they are needed. Threads in step show no races. Approximations (ex2, div.full, rsqrt) are off by a unit in
the last place here, so that nobody builds on them.
"""
