"""Encoders in real executors: vectors and classes over the bus, of one rank and of two."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModel, AutoModelForSequenceClassification

from shared.messages import GenerationRequest, ModelCard
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.executor.rings import MODEL, VOCABULARY, Rings
from tests.unit.executor.model.encoders.tiny import make_encoder
from tests.unit.executor.model.loading.test_gguf_encoders import make
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

PROMPTS = {f"e{at}": [4 + (at * 31 + i * 7) % (VOCABULARY - 4) for i in range(3 + 11 * at)] for at in range(6)}


def served_encoder(directory: Path, head: str = "", **settings: Any) -> Path:
    make_encoder(directory, "bert", head, vocab_size=VOCABULARY, **settings)
    for name, content in tiny_files().items():
        if name != "config.json":
            (directory / name).write_bytes(content)
    return directory


def ask(name: str, prompt: list[int], **fields: Any) -> GenerationRequest:
    return GenerationRequest(name, "r", MODEL, "me", prompt, 1, **fields)


@pytest.mark.slow
async def test_vectors_and_classes(house: Rings, bus: Bus, tmp_path: Path) -> None:
    import torch

    embedder = served_encoder(tmp_path / "embedder")
    classes = {"num_labels": 2, "id2label": {0: "no", 1: "yes"}}
    classifier = served_encoder(tmp_path / "classifier", "classes", **classes)
    context = ("--context-length", "0")
    await house.begin("vectors", embedder, *context, "--tp", "2")
    await house.begin("classes", classifier, *context, "--served-model-name", "classes")
    await house.ready("vectors", "classes")
    cards = await Bucket.open(bus, subjects.MODELS_BUCKET, ModelCard)
    card = next(card for card in (await cards.items()).values() if card.model == MODEL)
    assert (card.tasks, card.pooling, card.bidirectional) == (["embed"], "mean", True)
    assert (card.context_length, card.embedding_size) == (70, 48)
    await house.hand_in("vectors", [ask(name, prompt, embed=True) for name, prompt in PROMPTS.items()])
    await house.hand_in("classes", [ask(f"c{n}", p, classify=True) for n, p in PROMPTS.items()])
    model = AutoModel.from_pretrained(str(embedder)).eval()
    judge = AutoModelForSequenceClassification.from_pretrained(str(classifier)).eval()
    for name, prompt in PROMPTS.items():
        with torch.inference_mode():
            mean = model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0)
            logits = judge(torch.tensor([prompt])).logits[0]
        for entry, truth in ((name, mean / mean.norm()), (f"c{name}", logits)):
            _, last = await house.reader.finish(entry)
            assert last.finish == "stop", last.error
            found = np.frombuffer(last.vector, "<f4")
            assert found.tolist() == pytest.approx(truth.tolist(), abs=1e-4)
    assert await house.leave("vectors")


@pytest.mark.slow
async def test_vectors_of_a_gguf_file(house: Rings, bus: Bus, tmp_path: Path) -> None:
    """Given by its path; what it is follows from the file."""
    import torch

    source, file = make(tmp_path / "made", "bert", "F32", vocab_size=VOCABULARY)
    await house.begin("vectors", file, "--context-length", "0")
    await house.ready("vectors")
    cards = await Bucket.open(bus, subjects.MODELS_BUCKET, ModelCard)
    card = next(card for card in (await cards.items()).values() if card.model == MODEL)
    assert (card.tasks, card.pooling, card.bidirectional) == (["embed"], "cls", True)
    assert (card.context_length, card.embedding_size, card.weights) == (70, 64, "GGUF")
    await house.hand_in("vectors", [ask(name, prompt, embed=True) for name, prompt in PROMPTS.items()])
    model = AutoModel.from_pretrained(str(source)).eval()
    for name, prompt in PROMPTS.items():
        with torch.inference_mode():
            first = model(torch.tensor([prompt])).last_hidden_state[0, 0]
        _, last = await house.reader.finish(name)
        assert last.finish == "stop", last.error
        found = np.frombuffer(last.vector, "<f4")
        assert found.tolist() == pytest.approx((first / first.norm()).tolist(), abs=1e-4)
