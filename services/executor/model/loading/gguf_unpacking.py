"""A GGUF file as transformers unpacks it, for architectures whose weights are not served from the file.

Its reader passes over tensors that it does not know, and fills what it does not find with random numbers. Here both are
refused, with the tensors.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.executor.families.gguf import GgufArchitecture
from services.executor.families.gguf_architectures import gguf_architecture
from services.executor.model.loading.weight_files import some_of
from shared.errors import ModelLoadError

if TYPE_CHECKING:
    from services.executor.model.loading.gguf_file import GgufFile

# Halves of one weight: where one of them is missing the reader leaves zeros.
_EXPERTS = (".ffn_gate_exps", ".ffn_up_exps")


def unpacked_model(file: "GgufFile", named: dict[str, Any]) -> Any:
    """The transformers model of `file`, in bf16; `named` leads transformers to it. Raises `ModelLoadError` where the
    model and the file have not the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            dtype=torch.bfloat16,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused here, by name
            **named,
            **_dequantize(),
        )
    except RuntimeError as error:  # it refers to a report that nobody is shown
        raise ModelLoadError(
            f"The tensors of {file.path} do not make up a model of its architecture; it is damaged or newer than this "
            "program, fetch it again, or use a safetensors directory."
        ) from error
    _check_sizes(file.path, report["mismatched_keys"])
    row = gguf_architecture(file.header.metadata)
    stored = {tensor.name for tensor in file.header.tensors}
    places = {} if _names_all(row.name) else _places(model, row)
    missing = _missing(stored, places, report["missing_keys"])
    unread = set(report["unexpected_keys"])
    if places:
        unread |= stored - places.keys() - set(row.follow)
    if missing or unread:
        raise ModelLoadError(_refusal(file.path, missing, sorted(unread)))
    return model


def _check_sizes(path: Path, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    for name, stored, built in sorted(mismatched):
        raise ModelLoadError(
            f"The tensor for {name} in {path} has the shape {list(stored)} where the file's metadata call for "
            f"{list(built)}; it is damaged, fetch it again."
        )


def _names_all(architecture: str) -> bool:
    """Whether transformers reads files of `architecture` as it reads other checkpoints: what it has passed over is in
    its report."""
    try:
        from transformers.integrations.gguf import is_gguf_arch_supported
    except ImportError:  # an older version
        return False
    return bool(is_gguf_arch_supported(architecture))


def _places(model: Any, architecture: GgufArchitecture) -> dict[str, str]:
    """By the file's name of a tensor what transformers' reader makes it a part of."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(architecture.name, TensorProcessor)(config=model.config.to_dict())
    places: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    experts = {f"{name}.weight": place for name, place in places.items() if name.endswith("_exps")}
    return {**places, **experts, **architecture.names}


def _missing(stored: set[str], places: Mapping[str, str], unfound: Iterable[str]) -> list[str]:
    """What of the model is in none of the tensors `stored`, by the file's names where there are some."""
    halves = {name for name in places if name.removesuffix(".weight").endswith(_EXPERTS)}
    lacking = {name for name in halves if name.endswith(".weight")} - stored
    for place in unfound:
        names = [name for name in places if places[name] == place and name not in halves]
        lacking.add(names[0] if names else place)
    return sorted(lacking)


def _refusal(path: Path, missing: list[str], unread: list[str]) -> str:
    lacks = f"lacks {some_of(missing)}" if missing else ""
    holds = f"holds {some_of(unread)}, which nothing reads" if unread else ""
    return (
        f"The file {path} {' and '.join(filter(None, (lacks, holds)))}, so the model would not be its own; fetch it "
        "again, or use a safetensors directory."
    )


def _dequantize() -> dict[str, Any]:
    """What `from_pretrained` must be told to unpack the weights: older versions do so unasked."""
    import transformers

    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}
