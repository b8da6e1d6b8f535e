"""What is put off when PyTorch is imported and left out with transformers, in processes of their own."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("first", ["torch._prims", "torch._dynamo", "torch.utils._content_store", "torch._refs"])
def test_pytorch_imports_its_own_parts_in_any_order(first: str) -> None:
    """A rank on a GPU imported TorchDynamo before its model was built, and ended there."""
    said = subprocess.run([sys.executable, "-c", LATER.format(first=first)], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "(2, 3)"


LOGITS = """
import sys
from services.executor.core import transformers_imports
from services.executor.core.torch_imports import import_rest
if "{how}" != "plainly":
    if "{how}" == "in vain":
        transformers_imports.MODULES += ("transformers.no_such_module",)
    transformers_imports.import_transformers()
    import_rest()
left_out = {{"torch._dynamo", "torch.distributed.tensor", "transformers.generation.continuous_batching"}}
print(len(left_out - sys.modules.keys()), "transformers" in sys.modules)
import torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                  intermediate_size=48)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
with torch.inference_mode():
    print(model(torch.arange(9)[None]).logits.sum().item())
import torch._dynamo
print(torch._dynamo.disable.__module__)
"""


def said(how: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-c", LOGITS.format(how=how)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return said("plainly")


def test_models_are_the_same_without_what_is_left_out(plain: list[str]) -> None:
    assert plain[0] == "3 False"
    assert said("without") == ["3 True", *plain[1:]]


def test_a_version_that_needs_it_is_imported_plainly(plain: list[str]) -> None:
    assert said("in vain") == plain
