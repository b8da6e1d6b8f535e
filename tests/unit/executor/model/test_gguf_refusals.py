"""Why files of an architecture without a row are refused."""

import gguf
import pytest

from services.executor.families.gguf_architectures import GGUF, gguf_architecture
from services.executor.families.gguf_refusals import REASONS, refusal
from shared.errors import ModelLoadError

LLAMA = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def tensors(*more: str) -> list[str]:
    blocks = [f"blk.{layer}.{name}.weight" for layer in range(2) for name in (*LLAMA, *more)]
    return ["token_embd.weight", "output_norm.weight", "output.weight", *blocks]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (tensors(), r"'llama' is nearest, and has the same tensors"),
        (tensors("attn_q_norm", "attn_k_norm"), r"'qwen3' is nearest, and has the same tensors"),
        (tensors("swirl", "whirl"), r"'llama' is nearest, and has no swirl, whirl$"),
        (tensors(*"abcdef"), r"'llama' is nearest, and has no a, b, c, d and 2 more$"),
        (["strange.weight"], r"nobody has said what its tensors are"),
        ([], r"nobody has said what its tensors are"),
    ],
)
def test_the_nearest_of_an_unknown_one_is_told_and_what_it_has_not(names: list[str], expected: str) -> None:
    with pytest.raises(ModelLoadError, match=r"^The architecture 'qwen9' is not served from GGUF files: ") as raised:
        gguf_architecture({"general.architecture": "qwen9"}, names)
    assert "\n" not in str(raised.value)
    with pytest.raises(ModelLoadError, match=expected.replace("$", ";")):
        gguf_architecture({"general.architecture": "qwen9"}, names)


def test_names_are_shown_in_part() -> None:
    with pytest.raises(ModelLoadError, match=f"^The architecture '{'x' * 64}' is not"):
        gguf_architecture({"general.architecture": "x" * 1000})


def test_each_known_one_is_served_or_has_its_reason() -> None:
    known = set(gguf.MODEL_ARCH_NAMES.values())
    assert not REASONS.keys() & GGUF.keys()
    assert REASONS.keys() <= known
    for name in known - GGUF.keys():
        assert refusal(name, tensors(), GGUF) == REASONS.get(name, "transformers has no such model")
