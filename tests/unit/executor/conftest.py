"""PyTorch in the tests' own process has one thread.

Tensors here are tiny, and tests run beside each other: threads of as many pools as there are processes would wait for
each other's cores, which takes twice the CPU time. Processes that tests start choose for themselves.
"""

import torch

torch.set_num_threads(1)
