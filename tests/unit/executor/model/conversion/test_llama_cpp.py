"""What llama.cpp makes of the files that we write, beside what we do: its tokens, log probabilities and perplexity.

    RYZANSTEIN_LLAMA_CPP  the directory of its programs, where llama-perplexity is not on the path

Skipped where it is nowhere.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.engine.weight_quality import by_the_executor, by_transformers, opened
from services.executor.model.conversion.convert import convert
from services.executor.model.conversion.gguf_types import DTYPES
from tests.unit.executor.model.conversion.conftest import TOKENIZER, MakeModel
from tests.unit.executor.model.conversion.test_convert import GEMMA3_LAYERS, GEMMA3_ROPE
from tests.unit.executor.model.lanes import natively
from tests.unit.executor.model.loading import test_gguf_dense as dense
from tests.unit.executor.model.loading import test_gguf_families as families
from tests.unit.executor.model.loading import test_gguf_layers as layers
from tests.unit.executor.model.loading import test_gguf_mixtures as mixtures
from tests.unit.executor.model.loading import test_gguf_state_spaces as state_spaces
from tests.unit.executor.model.tiny import logits_of

PROGRAM = shutil.which(
    "llama-perplexity", path=os.environ.get("RYZANSTEIN_LLAMA_CPP", "") + os.pathsep + os.environ["PATH"]
)
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="NOT JUDGED BY llama.cpp: no llama-perplexity is installed"),
    natively,
]
CONTEXT = 128
TEXT = " ".join(np.random.default_rng(3).choice(["ab", "abab", "aab", "b", "ba", "bbb"], 4 * CONTEXT))


def read(file: Path, scratch: Path) -> tuple[Tensor, Tensor]:
    """What llama.cpp makes of the text: tokens [windows, CONTEXT], and from the middle of a window on the log
    probabilities of the next token, float32 [windows, CONTEXT // 2 - 1, vocabulary]."""
    assert PROGRAM is not None
    (scratch / "text").write_text(TEXT)
    kept = scratch / "logits"
    options = ["-f", str(scratch / "text"), "-c", str(CONTEXT), "-b", str(CONTEXT), "-t", "1"]
    command = [PROGRAM, "-m", str(file), *options, "--kl-divergence-base", str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return _kept(kept.read_bytes())


def _kept(content: bytes) -> tuple[Tensor, Tensor]:
    """As tools/perplexity/perplexity.cpp writes it: for each position a scale, the least, and codes of 16 bits."""
    assert content[:8] == b"_logits_"
    context, vocabulary, windows = np.frombuffer(content, np.int32, 3, 8).tolist()
    assert context == CONTEXT
    tokens = np.frombuffer(content, np.int32, windows * context, 20).reshape(windows, context)
    width = 2 * ((vocabulary + 1) // 2) + 4
    rows = np.frombuffer(content, np.uint16, offset=20 + tokens.nbytes).reshape(windows, -1, width)
    scale, least = np.split(np.ascontiguousarray(rows[..., :4]).view(np.float32), 2, axis=-1)
    found = rows[..., 4 : 4 + vocabulary].astype(np.float32) * scale + least
    return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(found)


def later(logits: Tensor) -> Tensor:
    """The part of ours that llama.cpp keeps."""
    return logits[:, CONTEXT // 2 : -1].float().log_softmax(-1)


def loss(logprobs: Tensor, tokens: Tensor) -> float:
    return -float(logprobs.gather(-1, tokens[:, CONTEXT // 2 + 1 :].unsqueeze(-1)).mean())


def divergence(first: Tensor, second: Tensor) -> float:
    return float((first.exp() * (first - second)).sum(-1).mean())


@pytest.fixture
def source(model_of: MakeModel) -> Path:
    directory = model_of(
        "llama",
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2 * CONTEXT,
    )
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    return directory


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_computes_what_we_serve(source: Path, tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "model.gguf"
    convert(source, file, "gguf", dtype, lambda *_: None)
    tokens, theirs = read(file, tmp_path)
    ids = Tokenizer.from_file(str(source / "tokenizer.json")).encode(TEXT).ids
    assert tokens.flatten().tolist() == ids[: tokens.numel()]

    model, directory = opened(file, torch.float32, tmp_path / "cache")
    with torch.inference_mode():
        exact = later(by_transformers(model)(tokens))
        ours = later(by_the_executor(directory, None, *tokens.shape)(tokens))
    assert exact.exp().amax(-1).mean() > 0.05, "too flat for the comparison to mean anything"
    assert loss(ours, tokens) == pytest.approx(loss(theirs, tokens), rel=1e-2)
    # Both round activations, and ours are in bf16 between layers.
    assert divergence(exact, theirs) < 1e-2
    assert divergence(exact, ours) < 1.25 * divergence(exact, theirs) + 1e-3


GEMMA = {"query_pre_attn_scalar": 16}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("seed_oss", {}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("gemma", {}),
        ("gemma2", GEMMA),
        ("gemma3_text", {**GEMMA, **GEMMA3_LAYERS, "rope_parameters": GEMMA3_ROPE}),
    ],
)
def test_it_computes_each_architecture(
    model_of: MakeModel, tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    made = model_of(model_type, hidden_size=144, max_position_embeddings=2 * CONTEXT, **changes)
    source = made.rename(tmp_path / "tiny")  # it looks for tokens by what a model is called
    (source / "tokenizer.json").write_text(json.dumps({**TOKENIZER, "post_processor": None}))
    convert(source, tmp_path / "model.gguf", "gguf", "f32", lambda *_: None)
    tokens, theirs = read(tmp_path / "model.gguf", tmp_path)
    model, _ = opened(source, torch.float32, tmp_path / "cache")
    with torch.inference_mode():
        exact = later(by_transformers(model)(tokens))
    assert divergence(exact, theirs) < 1e-4


# But for Bamba, of whose heads llama.cpp turns other values together than transformers does, and a layer that is not
# there.
READ = [(layers, name) for name in ("gemma4", "gemma4/experts", "lfm2", "lfm2_moe")]
READ += [(mixtures, name) for name in ("gpt_oss/unscaled", "llama4")]
READ += [(state_spaces, name) for name in state_spaces.MODELS if name not in ("bamba", "nemotron_h_moe/behind")]


@pytest.mark.parametrize(("module", "name"), READ)
def test_files_that_we_only_read_are_as_it_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    """By which the layouts are held that these modules write."""
    monkeypatch.setattr(f"{__name__}.TEXT", TEXT.replace(" ", ""))  # of which those files have no token
    source, file = module.make(tmp_path, name, "F32")
    tokens, theirs = read(file, tmp_path)
    model, _ = opened(source, torch.float32, tmp_path / "cache")
    with torch.inference_mode():
        exact = later(by_transformers(model)(tokens))
    assert divergence(exact, theirs) < 1e-3  # of experts that nearly tie it may choose others


# What it computes otherwise than the models were made to: Phi MoE's choice of experts, StarCoder2's window, the scale
# of MiniCPM's logits where a file says none. Of Command R's it reads norms of heads where there are 64 layers.
OTHERWISE = {"phimoe", "phimoe/long", "starcoder2", "minicpm/older", "command-r"}


@pytest.mark.parametrize("name", [name for name in dense.MODELS if name not in OTHERWISE])
def test_files_of_dense_models_are_as_it_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(f"{__name__}.TEXT", TEXT.replace(" ", ""))
    model, file = dense.make(tmp_path, name, "F32")
    tokens, theirs = read(file, tmp_path)
    with torch.inference_mode():
        exact = later(model(tokens, use_cache=False).logits)
    assert divergence(exact, theirs) < 1e-3


# Baichuan 7B, which turns positions, it knows by its 32 layers.
@pytest.mark.parametrize("name", [name for name in families.CASES if name != "baichuan"])
def test_files_of_further_families_are_as_it_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By which the layout that test_gguf_families.py writes is held."""
    monkeypatch.setattr(f"{__name__}.TEXT", TEXT.replace(" ", ""))
    source, file = families.make(tmp_path, name, "F32")
    tokens, theirs = read(file, tmp_path)
    with torch.inference_mode():
        exact = later(torch.stack(logits_of(theirs(source), tokens.tolist())))
    assert (exact.exp() * (exact - theirs)).sum(-1).median() < 1e-4  # of what nearly ties it may choose others
