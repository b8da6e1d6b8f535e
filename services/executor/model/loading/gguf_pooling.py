"""What GGUF files say of vectors and classes, in the words of sentence-transformers' files and of config.json.

    ARCHITECTURE.pooling_type │ 0 none, 1 mean, 2 cls, 3 last: modules.json and 1_Pooling │ 4 classes: cls.output.weight
    dense_2.weight, dense_3.weight │ layers behind the pooling: 2_Dense and 3_Dense, without activation

Vectors are brought to length 1, as llama.cpp has it: files do not say it. Source: llama.cpp, conversion/base.py
(`_try_set_pooling_type`) and llama-graph.cpp (`build_pooling`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from services.executor.families.gguf import GgufArchitecture
from services.executor.model.catalogue import is_encoder
from shared.errors import ModelLoadError

if TYPE_CHECKING:  # with gguf
    from services.executor.model.loading.gguf_file import GgufFile, GgufTensor

_NONE, _CLASSES = 0, 4
_POOLINGS = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
CLASSES = "cls.output.weight"
_ANSWERS = ["yes", "no"]  # of language models that judge, by their last token
_TEMPLATE = "tokenizer.chat_template.rerank"  # with {query} and {document} in it
_MARK = "<Instruct>: "  # in it, before what a client may say otherwise
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def dense_name(directory: str) -> str:
    """The file's tensor of the layer that sentence-transformers keeps in `directory`."""
    return f"dense_{directory.partition('_')[0]}.weight"


def encoder_settings(files: "Sequence[GgufFile]", row: GgufArchitecture, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an encoder with these `settings` beside its sizes; none of another model. Raises `ModelLoadError` where
    the model reads texts otherwise than is served."""
    both_ways = files[0].header.metadata.get(f"{row.name}.attention.causal") is False
    if not is_encoder(settings):
        if both_ways:
            raise ModelLoadError(
                f"The file {files[0].path} says {row.name}.attention.causal false: its model reads texts in both "
                "directions, which models of its architecture are not served to do; choose another."
            )
        return {}
    kinds = {tensor.kind.name for tensor in _tensors(files).values() if len(tensor.shape) > 1}
    dtype = "float32" if kinds == {"F32"} else "float16" if kinds <= {"F32", "F16"} else "bfloat16"
    activation = files[0].header.metadata.get(f"{row.name}.hidden_activation")
    return {"dtype": dtype, **({"hidden_activation": activation} if isinstance(activation, str) else {})}


def class_settings(files: "Sequence[GgufFile]", row: GgufArchitecture, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a model with these `settings` that makes scores of classes; none of another. Raises `ModelLoadError`
    where the file has no such head."""
    tensors, key = _tensors(files), f"{row.name}.classifier.output_labels"
    head, kind = tensors.get(CLASSES), files[0].header.metadata.get(f"{row.name}.pooling_type")
    if kind != _CLASSES and (kind is not None or head is None or not is_encoder(settings)):
        return {}
    if head is None or len(head.shape) > 2 or head.shape[-1] != settings["hidden_size"]:
        shape = "no tensor" if head is None else f"{list(head.shape)} as the shape of"
        raise ModelLoadError(
            f"The file {files[0].path} has {shape} {CLASSES}, by which its classes are scored ({row.name}.pooling_type "
            f"{_CLASSES}); fetch it again, or choose another."
        )
    of_head = (name for name in row.names if name.startswith("cls.") and name.endswith(".weight"))
    if left_out := next((name for name in of_head if name not in tensors), None):
        raise ModelLoadError(
            f"The file {files[0].path} has no tensor {left_out}, through which its model's states go to {CLASSES}: "
            "scores would not be the model's; use its safetensors directory, or its name on the hub."
        )
    labels = files[0].array(key) if key in files[0].header.spans else [f"LABEL_{at}" for at in range(head.rows)]
    if len(labels) != head.rows:
        raise ModelLoadError(f"The file has {len(labels)} labels ({key}) for {head.rows} classes; fetch it again.")
    if labels == _ANSWERS and not is_encoder(settings):
        labels = _ANSWERS[:1]
    named = {str(at): label for at, label in enumerate(labels)}
    return {"architectures": [f"{row.config_type()}-ForSequenceClassification"], "id2label": named}


def pooling_files(files: "Sequence[GgufFile]", row: GgufArchitecture, settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts by the names of sentence-transformers' files; none where the file names no pooling. Of a language model
    that judges its chat template. Raises `ModelLoadError` for a pooling that is not served."""
    kind = files[0].header.metadata.get(f"{row.name}.pooling_type")
    if labels := settings.get("id2label"):
        judges = labels == {"0": _ANSWERS[0]} and not is_encoder(settings)
        return {"chat_template.jinja": _pair_template(files[0])} if judges else {}
    tensors = _tensors(files)
    layers = {f"{at}_Dense": tensors[name] for at in (2, 3) if (name := f"dense_{at}.weight") in tensors}
    if kind is None and layers:
        kind = 1  # EmbeddingGemma's
    if kind is None or (kind == _NONE and not is_encoder(settings)):
        return {}
    if not isinstance(kind, int) or kind not in _POOLINGS:
        raise ModelLoadError(
            f"The file {files[0].path} says {row.name}.pooling_type {kind!r:.20}, which is not served: vectors are "
            "the mean of all tokens, the first or the last one's; choose another."
        )
    modules = ["Transformer", "Pooling", *(["Dense"] * len(layers)), "Normalize"]
    paths = ["", "1_Pooling", *layers, f"{len(modules) - 1}_Normalize"]
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{module}"}
        for at, (path, module) in enumerate(zip(paths, modules, strict=True))
    ]
    texts: dict[str, Any] = {"modules.json": listed, "1_Pooling/config.json": {f"pooling_mode_{_POOLINGS[kind]}": True}}
    texts |= {f"{path}/config.json": _dense(tensor) for path, tensor in layers.items()}
    return {name: json.dumps(content, indent=2) for name, content in texts.items()}


def _pair_template(file: "GgufFile") -> str:
    """A template for messages with the roles query and document, and for an `instruction` where the file's has one."""
    said = file.header.metadata.get(_TEMPLATE)
    shown, before = [], ""
    for part in re.split(rf"(\{{query\}}|\{{document\}}|(?<={_MARK}).*)", said if isinstance(said, str) else _QWEN3):
        if part in ("{query}", "{document}"):
            role = part.strip("{}")
            shown.append(f'{{% for message in messages if message.role == "{role}" %}}{{{{ message.content }}}}')
            shown.append("{% endfor %}")
        else:
            text = json.dumps(part, ensure_ascii=False)
            shown.append(f"{{{{ instruction | default({text}) }}}}" if before.endswith(_MARK) else f"{{{{ {text} }}}}")
        before = part
    return "".join(shown)


def _dense(tensor: "GgufTensor") -> dict[str, Any]:
    outputs, inputs = (*tensor.shape, 0, 0)[:2]
    identity = "torch.nn.modules.linear.Identity"
    return {"in_features": inputs, "out_features": outputs, "bias": False, "activation_function": identity}


def _tensors(files: "Sequence[GgufFile]") -> dict[str, "GgufTensor"]:
    return {tensor.name: tensor for file in files for tensor in file.header.tensors}
