"""What is left out when transformers is imported, in processes of its own."""

import subprocess
import sys

import pytest

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


pytestmark = pytest.mark.slow


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
