"""What a decoder's checkpoint has behind its last norm: an output layer over the vocabulary, a classification head, or
nothing, where it was trained to embed.

    score.weight [labels, hidden]     of the last token: transformers' XxxForSequenceClassification
    cls.output.weight                 the same in a GGUF file; or the rows of "yes" and "no"
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.executor.core.prompt_results import Floats
from services.executor.model.loading.gguf_pooling import CLASSES
from services.executor.model.loading.gguf_weights import GgufWeights
from services.executor.model.loading.weight_files import WeightFiles
from services.executor.model.pooling import activation_of, is_classifier, labels_of
from shared.errors import ModelLoadError
from shared.models import linked_gguf

SCORE = "score.weight"


class ClassHead(NamedTuple):
    """Makes logits of classes."""

    weight: NDArray[np.float32]  # [labels, hidden]
    labels: list[str]
    activation: str

    def logits(self, states: Floats) -> Floats:
        """[P, labels] of [P, hidden]."""
        return states @ self.weight.T if states.size else states


def read_class_head(directory: Path, config: Any) -> ClassHead | None:
    """Of the decoder in `directory`, of this configuration; None: it is no classifier. Raises `ModelLoadError`."""
    if not is_classifier(config.to_dict()):
        return None
    labels = labels_of(config)
    if linked_gguf(directory):
        with GgufWeights(directory) as held:
            rows = held.tensor(CLASSES).view(-1, config.hidden_size)
        # "yes" against "no" is one class: the sigmoid of what is between them.
        weight = (rows[:1] - rows[1:] if len(rows) == 1 + len(labels) else rows).numpy()
        return ClassHead(weight, labels, activation_of(config))
    with WeightFiles(directory) as files:
        if files.shapes.get(SCORE) != (len(labels), config.hidden_size):
            raise ModelLoadError(
                f"The classifier in {directory} has no tensor {SCORE} of the shape [{len(labels)}, "
                f"{config.hidden_size}], which its config.json calls for; choose another model, or fetch it again."
            )
        weight = files.tensor(SCORE).float().numpy().copy()
    return ClassHead(weight, labels, activation_of(config))


def has_output_layer(directory: Path, config: Any, names: Mapping[str, object]) -> bool:
    """Whether a checkpoint with tensors of these `names` can generate: classifiers cannot, nor what
    sentence-transformers has saved without one."""
    if is_classifier(config.to_dict()):
        return False
    embeds = (directory / "modules.json").is_file()
    return not embeds or config.tie_word_embeddings or any(name.endswith("lm_head.weight") for name in names)
