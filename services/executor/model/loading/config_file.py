"""config.json as transformers understands it, checked before anything is built. Imports what reads configurations:
what builds models takes seconds more."""

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from services.executor.families.registry import family_of
from services.executor.model.catalogue import TEXT_ALONE, check_sizes, check_text_served, nearest, refusal_of
from services.executor.model.configuration import check_configuration, check_described, check_layer_types
from services.executor.model.loading.text_models import takes_more_than_text, text_config
from shared.errors import ModelLoadError, reason_of


def load_config(directory: Path) -> Any:
    """The transformers configuration of the model in `directory`, or of its text model where it takes more than text
    and that is served alone. Raises `ModelLoadError`.
    """
    _check_directory(directory)
    described: Any = None
    try:
        described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if not isinstance(described, dict):
            raise ValueError("it is not a JSON object")
        check_sizes(described)
        kind = described.get("model_type")
        served = isinstance(kind, str) and (refusal_of(kind) is None or kind in TEXT_ALONE)
        if served:  # others are refused with a reason of their own
            check_described(described)
        config = _read_config(directory, described)
        text = config.get_text_config()
    except ModelLoadError:
        raise
    except Exception as error:
        check_layer_types(described, ALLOWED_LAYER_TYPES)
        raise _unusable(directory, described, error) from error
    if served:
        check_configuration(text)
    if not takes_more_than_text(config):
        return config
    check_text_served(config)
    try:
        return text_config(config, described)
    except Exception as error:  # transformers' checks of its values
        raise _unusable(directory, described, error) from error


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise ModelLoadError(f"The model directory {directory} does not exist; check the path.")
    if not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            raise ModelLoadError(
                f"The directory {directory} holds an adapter (LoRA) and not a model; serve its base and load the "
                "adapter there (ryzanstein adapters load), or merge it into its model by PEFT and save that."
            )
        raise ModelLoadError(
            f"The directory {directory} has no config.json, so it is not a model; "
            "give a directory that transformers' save_pretrained made, a .gguf file or a hub name."
        )


def _read_config(directory: Path, described: dict[str, Any]) -> Any:
    """xLSTM 7B's names the kernels that its authors computed with, which transformers refuses where their package is
    not installed. None of them computes here."""
    if end := family_of(described.get("model_type")).authors_kernels:
        own = {key: value for key, value in described.items() if not key.endswith(end)}
        return AutoConfig.for_model(**own)
    return AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)


def _unusable(directory: Path, described: Any, error: Exception) -> ModelLoadError:
    model_type = described.get("model_type") if isinstance(described, dict) else None
    other = nearest(model_type) if isinstance(model_type, str) else ""
    is_known = model_type is None or model_type in CONFIG_MAPPING
    reason = reason_of(error) if is_known else f"transformers {transformers.__version__} knows no {model_type!r}"
    return ModelLoadError(
        f"The config.json in {directory} is not one that can be served ({reason}); "
        f"check the file, or choose a model of an architecture that transformers knows{other}."
    )
