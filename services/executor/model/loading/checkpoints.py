"""From what a user names (a directory, a .gguf file, a hub name) to a model directory.

Of a GGUF file the configuration and the tokenizer are written into a directory, which leads to the file by a link: the
weights are served from it. What is not served so (`families/gguf_architectures.py`) is unpacked there, once, as bf16.
The directory is made under a temporary name and renamed when it is whole, so an interrupted conversion is never served.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from services.executor.core.settings import ExecutorSettings
from services.executor.families.gguf import GgufArchitecture
from services.executor.families.gguf_architectures import gguf_architecture
from services.executor.model.catalogue import ORIGINAL_LENGTH, check_sizes
from services.executor.model.loading.gguf_errors import told_of_file
from services.executor.model.loading.gguf_metadata import check_described, end_tokens, positive, sampling_of, unsaid
from services.executor.model.loading.gguf_pooling import class_settings, encoder_settings, pooling_files
from services.executor.model.loading.gguf_settings import COMPUTED
from services.executor.model.loading.gguf_settings.common import Said
from services.executor.model.loading.gguf_tokenizer import WHOLE, chat_templates, tokenizer_json, tokenizer_settings
from services.executor.model.tokenizer_files import CONFIG, TOKENIZER, read_bundle
from shared.errors import ModelLoadError, reason_of
from shared.model_store.disk import mark_made
from shared.model_store.locks import claimed, hold_model
from shared.model_store.programs import CONVERSION, recommend
from shared.model_store.repository import directory_name
from shared.model_store.settings import Store
from shared.models import converted_name, file_of, link_gguf, linked_gguf, path_of, relink_gguf

if TYPE_CHECKING:  # with gguf, which a rank whose weights are cached does without
    from services.executor.model.loading.gguf_file import GgufFile, Value

log = structlog.get_logger(__name__)

ConversionProgress = Callable[[str, int, int], None]  # called with (stage, stages done, stages in all)


def model_directory(settings: ExecutorSettings) -> Path:
    """The directory of the model that the settings name, which nobody removes as long as this process lives. Raises as
    `resolve_model`."""
    directory = resolve_model(settings.model, settings.store, lambda *step: None, settings.revision)
    hold_model(directory, settings.model_cache)
    return directory


def resolve_model(name_or_path: str, store: Store, progress: ConversionProgress, revision: str = "") -> Path:
    """The model directory that `name_or_path` stands for, converted or fetched where need be.

    The cache of `store` holds converted GGUF files and models of the hub. Raises `ModelLoadError` and
    `ConfigurationError`.
    """
    cache_dir = store.cache
    pulled = cache_dir / directory_name(name_or_path, revision)
    if (pulled / "config.json").is_file():
        return pulled
    path = path_of(name_or_path := file_of(name_or_path))
    if path is not None and path.is_dir():
        if gone := next((link for link in linked_gguf(path) if not link.exists()), None):
            raise ModelLoadError(
                f"The file {gone.resolve()}, which holds the weights of the model in {path}, no longer exists; give "
                "the GGUF file by its present path."
            )
        return path
    file = path or Path(name_or_path)
    if file.suffix == ".gguf" and ((path is not None and path.exists()) or ":" not in name_or_path):
        return _of_gguf(file, cache_dir, progress)
    if path is not None and path.exists():
        raise ModelLoadError(f"{path} is neither a model directory nor a .gguf file; give one of these or a hub name.")
    if path is not None:
        raise ModelLoadError(f"The model {name_or_path} does not exist; check the path.")
    from shared.model_store.catalog import ensure_model

    return ensure_model(name_or_path, store, progress, revision=revision)[1]


def _of_gguf(file: Path, cache_dir: Path, progress: ConversionProgress) -> Path:
    target = cache_dir / converted_name(file)
    if not target.is_dir():
        with claimed(target, lambda: progress("waiting for another process", 0, 0)) as scratch:
            if not target.is_dir():  # the other one has made it
                convert_gguf(file, scratch / "model", progress)
                mark_made(scratch / "model", target.name)
                (scratch / "model").rename(target)
    relink_gguf(target, file)
    log.info("gguf_file", file=str(file))
    return target


def convert_gguf(file: Path, target: Path, progress: ConversionProgress) -> None:
    """Makes a model directory of `file`: configuration, tokenizer, chat template, and a link to the file.

    Atomic: `target` appears whole or not at all. Raises `ModelLoadError`.
    """
    from services.executor.model.loading.gguf_file import open_parts

    files = open_parts(file)
    with told_of_file(file):
        check_sizes(files[0].header.metadata)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch, told_of_file(file):
        made = Path(scratch) / "model"
        try:
            _convert(files, made, progress)
        except ModelLoadError:
            raise
        except Exception as error:
            raise ModelLoadError(
                f"The file {file} cannot be converted ({reason_of(error)}); it is damaged, fetch it again or use a "
                "safetensors directory."
            ) from error
        _publish(made, target)
    progress("done", len(CONVERSION) - 1, len(CONVERSION) - 1)


def _convert(files: "Sequence[GgufFile]", made: Path, progress: ConversionProgress) -> None:
    """Writes all but the weights, and a link to them."""

    def stage(name: str) -> None:
        progress(name, CONVERSION.index(name), len(CONVERSION) - 1)

    stage("header")
    header = files[0].header.metadata
    check_described(files)
    ends = end_tokens(files[0])
    settings = _settings(files)
    tokens = {f"{name}_token_id": header.get(f"tokenizer.ggml.{word}_token_id") for name, word in _TOKENS.items()}
    settings |= {**tokens, "eos_token_id": ends[0]}  # else one has what transformers takes by default
    stage("tokenizer")
    texts = _tokenizer_files(files[0], ends[0], int(settings["max_position_embeddings"]))
    _check_tokens(files[0], ends, int(settings["vocab_size"]))
    stage("write")
    made.mkdir()
    texts["config.json"] = json.dumps(settings, indent=2, sort_keys=True)
    texts |= pooling_files(files, gguf_architecture(header), settings)
    link_gguf(made, files[0].path)
    generation: dict[str, Any] = {name: token for name, token in tokens.items() if token is not None}
    generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    texts["generation_config.json"] = json.dumps(generation, indent=2, sort_keys=True)
    for name, text in texts.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text, encoding="utf-8")
    recommend(made, sampling_of(header))
    if WHOLE in header:  # which nobody has looked into yet
        try:
            read_bundle(made)
        except ModelLoadError as error:
            told = str(error).replace(f"The file {made / TOKENIZER}", f"The {WHOLE} of {files[0].path}")
            raise ModelLoadError(told) from error


def _check_tokens(file: "GgufFile", ends: Sequence[int], rows: int) -> None:
    """Raises `ModelLoadError` where the model has no rows for all tokens, or a text would never end."""
    count = len(file.array("tokenizer.ggml.tokens"))
    if count > rows:
        raise ModelLoadError(
            f"The file {file.path} has {count} tokens, and {rows} rows of token_embd.weight for them: it is damaged, "
            "or of two models; fetch it again, or choose another."
        )
    if wrong := next((end for end in ends if not 0 <= end < count), None):
        raise ModelLoadError(
            f"The file {file.path} says that token {wrong} ends an answer, of {count} tokens; fetch it again."
        )


def _settings(files: "Sequence[GgufFile]") -> dict[str, Any]:
    """config.json, by the row of the architecture. What is not in it has transformers' default."""
    header = files[0].header.metadata
    row = gguf_architecture(header)
    settings = _own_settings(files, row, row.settings)
    settings["dtype"] = "bfloat16"
    if width := header.get(f"{row.name}.expert_feed_forward_length"):
        settings["moe_intermediate_size"] = width
    names = {tensor.name for file in files for tensor in file.header.tensors}
    settings["tie_word_embeddings"] = "output.weight" not in names
    for name, like in row.defaults.items():
        settings.setdefault(name, like and settings[like])
    if row.largest:
        widest = settings["num_hidden_layers"] == row.largest
        width = settings["hidden_size"] // settings["num_attention_heads"] if widest else settings["head_dim"]
        settings["query_pre_attn_scalar"] = width
    settings |= encoder_settings(files, row, settings) | class_settings(files, row, settings)
    _set_rotary(settings, header, row, {**_rope_scaling(files, row), **_rotated_part(files, row, settings)})
    return settings


def _said_beside(header: "Mapping[str, Value]", row: GgufArchitecture) -> dict[str, Any]:
    settings: dict[str, Any] = dict(row.constants)
    for key, name in row.optional.items():
        said = f"{row.name}.{key}"
        value = (header.get(said) or None) if key in _NONE_BY_ZERO else positive(header, said)
        settings |= {} if value is None else {name: value}
    return settings


_NONE_BY_ZERO = ("attention.sliding_window",)


def _set_rotary(
    settings: dict[str, Any], header: "Mapping[str, Value]", row: GgufArchitecture, scaling: dict[str, Any]
) -> None:
    if row.rotates_in_part:
        head_dim = settings["head_dim"]
        if rotated := positive(header, f"{row.name}.rope.dimension_count", head_dim):
            scaling = {**scaling, "partial_rotary_factor": rotated / head_dim}
    held = settings.get("rope_parameters") or {}
    if "full_attention" in held:  # windows have positions of their own, which are not scaled
        held["full_attention"] |= scaling
    else:
        held |= scaling
    settings["rope_parameters"] = held


_THETA = 10_000.0  # the base of rotary positions where a file says none. Source: llama.cpp
# What a file has to say, behind its architecture's name, and config.json's word for it.
_SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


def _own_settings(files: "Sequence[GgufFile]", row: GgufArchitecture, settings: Mapping[str, str]) -> dict[str, Any]:
    """Of config.json. Raises `ModelLoadError` where the file does not say what it has to."""
    header = files[0].header.metadata
    said = {key.removeprefix(f"{row.name}."): value for key, value in header.items() if isinstance(value, int | float)}
    wanted = {key: name for key, name in {**_SETTINGS, **settings}.items() if name}
    if missing := [key for key in wanted if key not in said]:
        raise unsaid(files[0].path, f"{row.name}.{missing[0]}")
    tensors = {tensor.name: tensor for file in files for tensor in file.header.tensors}
    if (embedding := tensors.get("token_embd.weight")) is None:
        raise ModelLoadError(f"The file {files[0].path} has no tensor token_embd.weight; it holds no language model.")
    heads = said.get("attention.head_count", 0)
    head_dim = {"head_dim": said.get("attention.key_length", said["embedding_length"] // max(1, heads))}
    key_heads = said.get("attention.head_count_kv", heads)
    rope = {"rope_type": "default", "rope_theta": said.get("rope.freq_base", _THETA)}
    return {
        "model_type": row.config_type(),
        **{name: said[key] for key, name in wanted.items()},
        **({"num_key_value_heads": key_heads} if key_heads else {}),
        **(head_dim if row.settings.get("attention.key_length") != "" else {}),
        "vocab_size": embedding.shape[0],
        "rope_parameters": {kind: dict(rope) for kind in row.rotations} or rope,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        **_said_beside(header, row),
        **_computed(files[0], row, {name: tensor.shape for name, tensor in tensors.items()}),
    }


def _computed(file: "GgufFile", row: GgufArchitecture, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    entries = file.header.metadata.items()
    keys = {key.removeprefix(f"{row.name}."): value for key, value in entries if not isinstance(value, str)}
    said = Said(keys, shapes)
    try:
        return {name: value for one in row.computed for name, value in COMPUTED[one](said).items()}
    except KeyError as error:
        raise unsaid(file.path, f"{row.name}.{error.args[0]}") from None


_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}


_BETAS = ("beta_fast", "beta_slow")  # turns between which YaRN scales frequencies in part


def _rope_scaling(files: "Sequence[GgufFile]", row: GgufArchitecture) -> dict[str, Any]:
    """What the metadata say of scaled rotary positions, in the words of config.json; empty where they are not."""
    header, prefix = files[0].header.metadata, f"{row.name}.rope.scaling."
    kind, factor = header.get(f"{prefix}type"), header.get(f"{prefix}factor")
    whole, original = header[f"{row.name}.context_length"], header.get(f"{prefix}original_context_length")
    if original is None and ORIGINAL_LENGTH in row.defaults:
        original = whole
    factors = {
        length: file.numbers(tensor).tolist()
        for file in files
        for tensor in file.header.tensors
        for length in ("long", "short")
        if tensor.name == f"rope_factors_{length}.weight"
    }
    known = {} if original is None else {"original_max_position_embeddings": original}
    if factors or kind == "longrope" or (kind is None and f"{prefix}attn_factor" in header):
        for length in ("long", "short"):
            if length not in factors:
                raise _without(f"rope_factors_{length}.weight")
        known.setdefault("original_max_position_embeddings", whole)
        return {"rope_type": "longrope", "long_factor": factors["long"], "short_factor": factors["short"], **known}
    if kind in (None, "none") and factor in (None, 0.0, 1.0):
        return {}
    if kind in ("linear", "yarn") and positive(header, f"{prefix}factor"):
        betas = {name: header[f"{prefix}yarn_{name}"] for name in _BETAS if f"{prefix}yarn_{name}" in header}
        return {"rope_type": kind, "factor": factor, **({**known, **betas} if kind == "yarn" else {})}
    if kind in (None, "linear", "yarn"):
        raise unsaid(files[0].path, f"{prefix}{'factor' if kind else 'type'}")
    raise ModelLoadError(
        f"The file {files[0].path} says {prefix}type {kind!r:.40}, a rotary scaling that is not supported; choose "
        "another."
    )


def _rotated_part(files: "Sequence[GgufFile]", row: GgufArchitecture, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What part of a head turns, of architectures whose files say it by a factor for each frequency: 1, or one that
    leaves nothing of it. Raises `ModelLoadError`."""
    if _ROTARY_FACTORS not in row.follow:
        return {}
    tensors = ((file, tensor) for file in files for tensor in file.header.tensors if tensor.name == _ROTARY_FACTORS)
    if (found := next(tensors, None)) is None:
        raise _without(_ROTARY_FACTORS)
    factors = found[0].numbers(found[1]).tolist()
    turned = factors.count(1.0)
    if (
        2 * len(factors) != settings["global_head_dim"]
        or factors[:turned] != [1.0] * turned
        or min(factors[turned:], default=_NOTHING) < _NOTHING
    ):
        raise ModelLoadError(
            f"The file's {_ROTARY_FACTORS} says other than which frequencies of a head of "
            f"{settings['global_head_dim']} values turn; fetch it again."
        )
    return {"partial_rotary_factor": turned / len(factors)}


_ROTARY_FACTORS = "rope_freqs.weight"
_NOTHING = 1e20  # by which a frequency is divided that is to be none


def _without(tensor: str) -> ModelLoadError:
    return ModelLoadError(f"The file has no tensor {tensor}, by which its rotary positions are scaled; fetch it again.")


def _tokenizer_files(file: "GgufFile", end: int, context_length: int) -> dict[str, str]:
    """Texts by the names of their files. `end`: the token that ends a text. Raises `ModelLoadError`."""
    contents = {TOKENIZER: tokenizer_json(file), CONFIG: tokenizer_settings(file, end, context_length)}
    texts = {name: json.dumps(content, ensure_ascii=False) for name, content in contents.items()}
    return texts | chat_templates(file)


def _publish(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        # Another process has published the same file meanwhile; its copy is as good.
        if not target.is_dir():
            raise
        shutil.rmtree(made)
