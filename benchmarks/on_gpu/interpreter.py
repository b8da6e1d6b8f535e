"""Whether Triton's kernels are compiled or interpreted: told to Triton before anything imports it.

Kernels, and Triton's own functions that they call, are decorated when their modules are imported; what the environment
says later comes too late for them. Whoever imports kernels outside of a server calls `choose` first.
"""

import os
from pathlib import Path

VARIABLE = "TRITON_INTERPRET"


def choose() -> None:
    """Interprets kernels where there is no NVIDIA GPU, unless the environment says something already."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        os.environ.setdefault(VARIABLE, "1")


def interprets() -> bool:
    """Whether kernels run on CPU tensors."""
    return os.environ.get(VARIABLE, "0").lower() in ("1", "true", "yes", "on", "y")
