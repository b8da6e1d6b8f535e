"""What the files of a model tell of its vectors and classes, where an engine pools by the same files."""

from pathlib import Path
from types import SimpleNamespace

import msgspec

from services.executor.core.engine import EngineSpec
from services.executor.engines.base import EngineFacts
from services.executor.model.catalogue import is_encoder
from services.executor.model.pooling import activation_of, is_classifier, labels_of, read_vectors
from services.executor.model.tokenizer_files import read_json


def with_pooling(spec: EngineSpec, facts: EngineFacts, directory: Path) -> EngineSpec:
    """`spec` with what the model in `directory` gives beside tokens, or in their place. Raises `ModelLoadError`."""
    if facts.tasks == ("generate",):
        return spec
    config = read_json(directory / "config.json")
    found = msgspec.structs.replace(spec, whole_prompts=is_encoder(config))
    if "embed" in facts.tasks:
        vectors = read_vectors(directory, dense=True)
        found = msgspec.structs.replace(
            found, pooling=vectors.pooling, normalized=vectors.normalized, embedding_size=facts.embedding_size
        )
    if "classify" in facts.tasks:
        classes = {"num_labels": len(facts.labels), "id2label": dict(enumerate(facts.labels))}
        described = SimpleNamespace(**(config | classes))
        found = msgspec.structs.replace(found, labels=labels_of(described), activation=activation_of(described))
    return found


def pools(config: dict[str, object], directory: Path) -> bool:
    """Whether vLLM gives vectors or classes of the model where nobody says what it is to do."""
    return is_encoder(config) or is_classifier(config) or (directory / "modules.json").is_file()
