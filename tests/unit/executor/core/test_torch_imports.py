"""What is put off when PyTorch is imported, in processes of its own."""

import subprocess
import sys

import pytest

CODE = """
from services.executor.core.torch_imports import import_rest, import_torch
import_torch()
import torch

def shape():
    try:
        return tuple(torch.cdist(torch.empty(2, 4, device="meta"), torch.empty(3, 4, device="meta")).shape)
    except NotImplementedError:
        return None

before = shape()
import_rest()
import_rest()
import_torch()
print(before, shape())
"""


@pytest.mark.slow
def test_shapes_are_computed_once_the_rest_is_imported() -> None:
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "None (2, 3)"


LATER = """
from services.executor.core.torch_imports import import_rest, import_torch
import_torch()
import {first}
import_rest()
import torch
import torch._dynamo
print(tuple(torch.cdist(torch.empty(2, 4, device="meta"), torch.empty(3, 4, device="meta")).shape))
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch._prims", "torch._dynamo", "torch.utils._content_store", "torch._refs"])
def test_pytorch_imports_its_own_parts_in_any_order(first: str) -> None:
    """A rank on a GPU imported TorchDynamo before its model was built, and ended there."""
    said = subprocess.run([sys.executable, "-c", LATER.format(first=first)], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "(2, 3)"
