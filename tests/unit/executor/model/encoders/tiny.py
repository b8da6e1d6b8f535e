"""Small random encoders in the directory format of the real ones."""

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from services.executor.families.registry import ENCODERS, family_of

_BASE = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 131,
    "max_position_embeddings": 70,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
    "mask_token_id": 3,
    "type_vocab_size": 2,
    "initializer_range": 0.2,
}
_OWN: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 24, "num_hidden_layers": 3},
    "deberta": {"type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {
        "type_vocab_size": 0,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
    },
    "distilbert": {"dim": 48, "n_heads": 4, "n_layers": 2, "hidden_dim": 64},
    "electra": {"embedding_size": 24},
    "eurobert": {"num_key_value_heads": 2},
    "gemma3_text": {
        "use_bidirectional_attention": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_key_value_heads": 1,  # as EmbeddingGemma has
        "head_dim": 16,
    },
    "modernbert": {"local_attention": 8, "num_hidden_layers": 4, "classifier_pooling": "mean"},
}


def config_of(model_type: str, **settings: Any) -> Any:
    kind = CONFIG_MAPPING[model_type]
    wanted = {**_BASE, **_OWN.get(model_type, {}), **settings}
    return kind(**wanted)


def make_encoder(directory: Path, model_type: str, head: str = "", **settings: Any) -> Path:
    """`head`: empty, `classes` or `words` (masked ones)."""
    assert model_type in ENCODERS or family_of(model_type).embeds_both_ways
    torch.manual_seed(len(model_type))
    kinds: dict[str, Any] = {
        "": AutoModel,
        "classes": AutoModelForSequenceClassification,
        "words": AutoModelForMaskedLM,
    }
    model = kinds[head].from_config(config_of(model_type, **settings)).eval()
    model.save_pretrained(str(directory))
    return directory


def takes_segments(model: Any) -> bool:
    base = model.base_model
    named = "token_type_ids" in inspect.signature(base.forward).parameters
    return named and (getattr(base.config, "type_vocab_size", 0) or 0) > 1
