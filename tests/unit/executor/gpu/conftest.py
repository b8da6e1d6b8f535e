"""Kernels are decorated when they are imported: the interpreter is chosen before that, unless there is a GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
