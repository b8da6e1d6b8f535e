"""The default model as transformers computes it, in fp32, for tests that compare what is served with it."""

from pathlib import Path
from typing import Any


def load_reference(directory: Path, kind: str = "AutoModelForCausalLM") -> Any:
    """`kind` of transformers' classes, of the weights in `directory`: of a GGUF file where it holds one."""
    import torch
    import transformers

    file = {"gguf_file": "model.gguf"} if (directory / "model.gguf").exists() else {}
    return getattr(transformers, kind).from_pretrained(str(directory), dtype=torch.float32, **file)
