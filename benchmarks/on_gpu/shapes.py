"""The models that are measured, and what arithmetic says of them: bytes and operations of a step. Pure.

A decode step reads every weight but the embedding's table (of which it reads one row a token), and the keys and
values of its sequences. A step of T tokens computes 2 operations for each weight and token, and 4 for each query head,
its width and each pair of a query and a key that it sees.
"""

from dataclasses import dataclass
from typing import Any, Literal

KvDType = Literal["bf16", "fp8", "int8"]
WeightDType = Literal["bf16", "fp8", "int8", "int4", "q4_k"]
# Of a weight of the layers, scales included, and of one of the embedding and the head.
BITS: dict[WeightDType, tuple[float, float]] = {
    "bf16": (16, 16),
    "fp8": (8, 16),
    "int8": (8, 16),
    "int4": (4.375, 6.5625),
    "q4_k": (4.625, 6.5625),
}
BLOCK = 16  # tokens of a KV block


@dataclass(frozen=True)
class Shape:
    """A Llama without its weights."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    theta: float = 500000.0
    context: int = 16384

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Numbers in the products of one layer."""
        kv = self.kv_heads * self.head_dim
        return self.hidden * (2 * self.hidden + 2 * kv + 3 * self.inner)

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All, norms left out: they are a thousandth of a per cent."""
        return self.layers * self.layer_weights + 2 * self.head_weights

    def weight_bytes(self, dtype: WeightDType) -> int:
        """That a decode step reads."""
        of_layers, of_head = BITS[dtype]
        return int(self.layers * self.layer_weights * of_layers + self.head_weights * of_head) // 8

    def held_bytes(self, dtype: WeightDType) -> int:
        """On the device, the embedding included."""
        return self.weight_bytes(dtype) + int(self.head_weights * BITS[dtype][1]) // 8

    def kv_bytes(self, dtype: KvDType) -> float:
        """Of one token in all layers, keys and values, scales included."""
        numbers = 2 * self.layers * self.kv_heads
        if dtype == "bf16":
            return numbers * self.head_dim * 2.0
        return numbers * (self.head_dim + 4.0 / BLOCK)

    def decode_bytes(self, batch: int, context: int, weights: WeightDType, kv: KvDType) -> float:
        """That one decode step of `batch` sequences of `context` tokens each reads."""
        return self.weight_bytes(weights) + batch * context * self.kv_bytes(kv)

    def flops(self, tokens: int, before: int = 0) -> float:
        """Of a chunk of `tokens` tokens of one prompt that follow `before` others; logits of one row."""
        pairs = tokens * before + tokens * (tokens + 1) / 2
        products = 2.0 * tokens * self.layers * self.layer_weights + 2.0 * self.head_weights
        return products + 4.0 * self.layers * self.heads * self.head_dim * pairs

    def config(self) -> Any:
        """As transformers has it."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta},
            max_position_embeddings=self.context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
        )


LLAMA_8B = Shape("8B", 4096, 14336, 32, 32, 8, 128256)  # Llama 3 8B
# Llama 2 13B, its context made longer.
LLAMA_13B = Shape("13B", 5120, 13824, 40, 40, 40, 32000, theta=10000.0)
LLAMA_7B = Shape("7B", 4096, 11008, 32, 32, 32, 32000, theta=10000.0)  # Llama 2 7B, its context made longer
TINY = Shape("tiny", 64, 128, 2, 2, 1, 256, theta=10000.0, context=512)  # for dry runs
MIDDLE = Shape("1B", 2048, 8192, 16, 32, 8, 32000)  # large enough for bf16 to be judged as it is used


def at_most(batch: int, context: int, shape: Shape, weights: WeightDType, kv: KvDType, memory: float) -> str:
    """Why the case does not fit `memory` bytes, or nothing where it does. A twentieth is left to the rest."""
    cache = batch * context * shape.kv_bytes(kv)
    needed = shape.held_bytes(weights) + cache
    if needed <= 0.95 * memory:
        return ""
    return (
        f"does not fit: weights {shape.held_bytes(weights) / 1e9:.0f} GB and KV {cache / 1e9:.0f} GB are "
        f"{needed / 1e9:.0f} GB of {memory / 1e9:.0f} GB"
    )
