"""The benchmark reads a text as the model does, and sees what compression changes."""

from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.engine.kv_quality import Feed, Model, cut, read_text
from tests.unit.executor.model.tiny import make_model, reference_logits

TEXTS = np.random.default_rng(5).integers(0, 131, (3, 70))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return Model.load(directory, torch.float32)


@pytest.mark.parametrize("chunk", [16, 24, 64])
def test_uncompressed_it_computes_what_the_model_does(directory: Path, model: Model, chunk: int) -> None:
    expected = torch.stack(reference_logits(directory, TEXTS.tolist()))
    feed = Feed(model, "bf16", 3, 70, chunk)
    logits = torch.cat([part for _, part in feed.read(TEXTS, chunk)], dim=1)
    assert (logits - expected).abs().max() < 1e-4
    reading = read_text(model, "bf16", TEXTS, chunk, 2)
    assert (reading.best == expected.argmax(-1).numpy()).all()
    known = torch.from_numpy(TEXTS[:, 1:]).flatten()
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), known, reduction="sum")
    assert reading.loss == pytest.approx(float(loss), rel=1e-5)


def test_codecs_show_up_and_overrides_take_them_back(model: Model) -> None:
    plain, int8, taken_back = (
        read_text(model, codec, TEXTS, 16, 3).loss for codec in ("bf16", "int8", "int8 0=bf16,1=bf16,2=bf16")
    )
    assert int8 != plain
    assert taken_back == plain


def test_a_text_is_cut_into_windows(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(300)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = " ".join(words)
    assert cut(text, tmp_path, 190, 100).tolist() == np.arange(200).reshape(2, 100).tolist()
    with pytest.raises(typer.BadParameter, match="fewer than the 400 asked for"):
        cut(text, tmp_path, 400, 100)
