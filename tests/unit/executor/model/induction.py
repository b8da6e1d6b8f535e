"""A model that can do one thing, by weights written by hand: go on as the text went on before (an induction head).

    ... 31 32 33 ... 31 ─▶ 32
    layer 0   reads the token before each: what came before 32 is known then
    layer 1   looks for tokens that came after such a one as this

A passage that stands once in a long text is repeated word for word as soon as its first word is said again; where the
passage cannot be seen, something else is.
"""

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

TOKENS = 40
HIDDEN, HEAD = 128, 64
# Where the residual stream has the token, the one before it, the one that is to come (each a unit vector), and 1.
_SELF, _BEFORE, _NEXT, _ONE = 0, TOKENS, 2 * TOKENS, 3 * TOKENS
# So many pairs of a head's values turn fast enough to tell positions apart; the others do not turn at all, in texts of
# some thousand tokens.
_THETA, _FAST = 1e12, HEAD // 2 - TOKENS // 2
# How sharply each layer looks: the first one's query and key, and the second one's.
_NEAR, _ALIKE = 12.0, 20.0
_SURE = 8.0  # how much the token that is to come stands out

# Tokens of which noise has none. The last token of all ends a text.
PASSAGE = tuple(range(TOKENS - 10, TOKENS - 1))
END = TOKENS - 1


def make_induction_model(directory: Path, context: int = 4096) -> Path:
    """Writes it as models lie on disks, without a tokenizer: weights in float32."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD,
        vocab_size=TOKENS,
        max_position_embeddings=context,
        rope_theta=_THETA,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=END,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
    )
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    weights = {"model.norm.weight": torch.ones(HIDDEN), **_outside()}
    for layer, (query, key, value, out) in enumerate((_reads_before(), _looks_for_alike())):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}self_attn.q_proj.weight": torch.cat([query, torch.zeros_like(query)]),
            f"{prefix}self_attn.k_proj.weight": key,
            f"{prefix}self_attn.v_proj.weight": value,
            f"{prefix}self_attn.o_proj.weight": torch.cat([out, torch.zeros_like(out)], 1),
            f"{prefix}mlp.gate_proj.weight": torch.zeros(64, HIDDEN),
            f"{prefix}mlp.up_proj.weight": torch.zeros(64, HIDDEN),
            f"{prefix}mlp.down_proj.weight": torch.zeros(HIDDEN, 64),
        }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _outside() -> dict[str, Tensor]:
    embed, head = torch.zeros(TOKENS, HIDDEN), torch.zeros(TOKENS, HIDDEN)
    embed[:, _SELF : _SELF + TOKENS] = torch.eye(TOKENS)
    embed[:, _ONE] = 1.0
    head[:, _NEXT : _NEXT + TOKENS] = torch.eye(TOKENS)
    return {"model.embed_tokens.weight": embed, "lm_head.weight": head}


# Query, key and value of the residual stream, and what is added to it.
Head = tuple[Tensor, Tensor, Tensor, Tensor]


def _reads_before() -> Head:
    """Queries turned back by one position: the keys of the token before point the same way."""
    query, key = torch.zeros(HEAD, HIDDEN), torch.zeros(HEAD, HIDDEN)
    size = _NEAR / _norm(2)
    for pair in range(_FAST):
        turn = _THETA ** (-2 * pair / HEAD)
        query[pair, _ONE] = size * math.cos(turn)
        query[pair + HEAD // 2, _ONE] = -size * math.sin(turn)
        key[pair, _ONE] = size
    return query, key, *_copies(_SELF, _BEFORE, 1.0 / _norm(2))


def _looks_for_alike() -> Head:
    """Queries are the token, keys the one before it."""
    query, key = torch.zeros(HEAD, HIDDEN), torch.zeros(HEAD, HIDDEN)
    size = _ALIKE / _norm(3)
    still = [at for at in range(HEAD) if at % (HEAD // 2) >= _FAST]
    for token, at in enumerate(still):
        query[at, _SELF + token] = size
        key[at, _BEFORE + token] = size
    return query, key, *_copies(_SELF, _NEXT, _SURE / _norm(3))


def _copies(source: int, target: int, size: float) -> tuple[Tensor, Tensor]:
    value, out = torch.zeros(HEAD, HIDDEN), torch.zeros(HIDDEN, HEAD)
    for token in range(TOKENS):
        value[token, source + token] = size
        out[target + token, token] = 1.0
    return value, out


def _norm(ones: int) -> float:
    """What RMSNorm makes of a 1 among so many."""
    return math.sqrt(HIDDEN / ones)
