"""From what a user names (a directory, a .gguf file, a hub name) to a model directory.

A GGUF file is dequantised once into a bf16 safetensors directory beside its tokenizer. The directory is
made under a temporary name and renamed when it is whole, so an interrupted conversion is never served.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.executor.model.loading.weight_files import WeightFiles
from shared.errors import ModelLoadError
from shared.models import converted_name, pulled_name

ConversionProgress = Callable[[str, int, int], None]
"""Called with (stage, stages done, stages in all)."""

_STAGES = ("header", "weights", "tokenizer", "write", "done")
_FETCHED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "*.model",
    "merges.txt",
    "vocab.txt",
)
_FETCHED_PYTORCH = (*_FETCHED, "pytorch_model*.bin")
"""Where a model has no safetensors."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    },
}
"""What transformers' GGUF reader leaves out, by `tokenizer.ggml.pre`, in the format of tokenizer.json."""


def resolve_model(name_or_path: str, cache_dir: Path, progress: ConversionProgress) -> Path:
    """The model directory that `name_or_path` stands for, converted or fetched where need be.

    `cache_dir` holds converted GGUF files and the models that `ryzanstein models pull` has fetched, under
    their names with `--` for `/`; other hub names go to the hub's own cache. Raises `ModelLoadError`.
    """
    pulled = cache_dir / pulled_name(name_or_path)
    if (pulled / "config.json").is_file():
        return pulled
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        target = cache_dir / converted_name(path)
        if not target.is_dir():
            convert_gguf(path, target, progress)
        return target
    if path.exists():
        raise ModelLoadError(
            f"{path} is neither a model directory nor a .gguf file; give one of these or a hub name."
        )
    if not _HUB_NAME.fullmatch(name_or_path):
        raise ModelLoadError(f"The model {name_or_path} does not exist; check the path.")
    return _fetch(name_or_path)


def convert_gguf(file: Path, target: Path, progress: ConversionProgress) -> None:
    """Dequantises `file` into `target`: bf16 weights, configuration, tokenizer and chat template.

    Atomic: `target` appears whole or not at all. Raises `ModelLoadError`.
    """
    from services.executor.model.loading.loader import load_config  # with transformers, which takes seconds

    _check_magic(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        made = Path(scratch) / "model"
        try:
            _convert(file, made, progress)
            load_config(made)
            WeightFiles(made).close()
        except ModelLoadError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise ModelLoadError(
                f"The file {file} cannot be converted ({reason}); it is damaged or of an architecture that "
                "transformers does not read from GGUF, fetch it again or use a safetensors directory."
            ) from error
        _publish(made, target)
    progress("done", len(_STAGES) - 1, len(_STAGES) - 1)


def _convert(file: Path, made: Path, progress: ConversionProgress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def stage(name: str) -> None:
        progress(name, _STAGES.index(name), len(_STAGES) - 1)

    stage("header")
    header = _header(file)
    stage("weights")
    model = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.bfloat16, local_files_only=True, **_dequantize()
    )
    stage("tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    stop_ids = [header[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot") if _has(header, name)]
    if stop_ids:
        unique = list(dict.fromkeys(stop_ids))
        model.generation_config.eos_token_id = unique[0] if len(unique) == 1 else unique
    stage("write")
    model.save_pretrained(str(made))
    for weights in made.glob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes them for their owner alone
    tokenizer.save_pretrained(str(made))
    _mend_tokenizer(made, str(header.get("tokenizer.ggml.pre")), int(model.config.max_position_embeddings))


def _has(header: dict[str, Any], name: str) -> bool:
    return header.get(f"tokenizer.ggml.{name}_token_id") is not None


def _dequantize() -> dict[str, Any]:
    """What `from_pretrained` must be told to unpack the weights: older versions do so unasked."""
    import transformers

    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def _header(file: Path) -> dict[str, Any]:
    """The scalar metadata of a GGUF file. Arrays (the vocabulary) are left out."""
    from gguf import GGUFReader

    fields = GGUFReader(str(file)).fields
    return {name: field.contents() for name, field in fields.items() if len(field.types) == 1}


def _check_magic(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ModelLoadError(f"The file {file} cannot be read ({error.strerror}); check the path.") from error
    if magic != b"GGUF":
        raise ModelLoadError(f"The file {file} is not a GGUF file; fetch it again.")


def _mend_tokenizer(directory: Path, pre: str, context_length: int) -> None:
    tokenizer = directory / "tokenizer.json"
    if pre in _PRE_TOKENIZERS:
        content = json.loads(tokenizer.read_text(encoding="utf-8"))
        content["pre_tokenizer"] = _PRE_TOKENIZERS[pre]
        tokenizer.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = directory / "tokenizer_config.json"
    content = json.loads(settings.read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):
        content.pop(name, None)
    content["model_max_length"] = context_length
    settings.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def _publish(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        # Another process has published the same file meanwhile; its copy is as good.
        if not target.is_dir():
            raise
        shutil.rmtree(made)


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        directory = Path(snapshot_download(name, allow_patterns=list(_FETCHED)))
        if not any(directory.glob("*.safetensors")):
            directory = Path(snapshot_download(name, allow_patterns=list(_FETCHED_PYTORCH)))
        return directory
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelLoadError(
            f"The model {name!r} is no directory here and cannot be fetched from the hub ({reason}); "
            "check the name, the network or your hub credentials."
        ) from error
