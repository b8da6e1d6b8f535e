"""A tokenizer.json in the words of GGUF: byte-level BPE (`gpt2`) and SentencePiece's BPE with byte tokens (`llama`).

SentencePiece's merges are held twice: as scores, by which llama.cpp merges the pair whose piece has the highest, and as
they are, for readers that take merges. Source: the GGUF specification (ggml, docs/gguf.md).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

from services.executor.model.loading.gguf_tokenizer import WHOLE
from services.executor.model.loading.pre_tokenizers import split_name
from services.executor.model.tokenizer_files import CONFIG, TEMPLATE, TOOL_TEMPLATE, check_templates
from shared.errors import ModelLoadError, reason_of

_SPACE = "\u2581"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_ENDS = ("eos", "eot", "eom")  # what files call the tokens that end an answer


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, config: Mapping[str, Any]) -> None:
    """Raises `ModelLoadError` for a tokenizer that a GGUF file would hold otherwise than it is."""
    try:
        _add_tokenizer(writer, directory, config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"The tokenizer in {directory} cannot be read ({reason_of(error)}); fetch the model again."
        ) from error


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path, config: Mapping[str, Any]) -> None:
    tokenizer = _tokenizer(directory)
    model = tokenizer["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    tokens, types = vocabulary(tokenizer, config["vocab_size"])
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(space_prefix(tokenizer))
        writer.add_token_scores(scores(tokens, merges))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_string(WHOLE, json.dumps(tokenizer, ensure_ascii=False))  # other readers have what is above
    generation = directory / "generation_config.json"
    settings = {**config, **(read_json(generation) if generation.is_file() else {})}
    stops = settings.get("eos_token_id")
    stops = stops if isinstance(stops, list) else [stops]
    ids = {name: settings.get(f"{name}_token_id") for name in ("bos", "pad", "unk")}
    if len(stops) > len(_ENDS):
        raise ModelLoadError(
            f"The answers of the model in {directory} end with any of {len(stops)} tokens, and a GGUF file has places "
            f"for {len(_ENDS)}; convert to safetensors."
        )
    ids |= dict(zip(_ENDS, stops, strict=False))
    if ids["unk"] is None and model.get("unk_token") in tokens:
        ids["unk"] = tokens.index(model["unk_token"])
    for name, number in ids.items():
        if isinstance(number, int):
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(_adds(tokenizer, tokens, ids["bos"]))
    check_templates(directory)
    writer.add_chat_template(_chat_templates(directory))


def _tokenizer(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(
            f"{directory} has no tokenizer.json, and a GGUF file needs one; fetch the model again, or load and save "
            "its tokenizer with transformers."
        )
    tokenizer = read_json(file)
    if (kind := (tokenizer.get("model") or {}).get("type")) != "BPE":
        raise ModelLoadError(
            f"The tokenizer in {directory} is of type {kind}, and only BPE (byte-level or SentencePiece's) is written "
            "as GGUF; convert to safetensors, or use llama.cpp's own converter."
        )
    return tokenizer


def vocabulary(tokenizer: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """`size` tokens by id, and GGUF's type of each; ids without a token are filled up."""
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [int(gguf.TokenType.UNUSED)] * size
    model = tokenizer["model"]
    listed = []
    for token, index in model["vocab"].items():
        of_byte = model.get("byte_fallback") and _BYTE.fullmatch(token)
        listed.append((token, index, gguf.TokenType.BYTE if of_byte else gguf.TokenType.NORMAL))
    for token in tokenizer.get("added_tokens") or ():
        text, kind = token["content"], gguf.TokenType.CONTROL
        if not token["special"]:  # looked for in texts as they come, with spaces and not what stands for them
            text, kind = text.replace(_SPACE, " "), gguf.TokenType.USER_DEFINED
        elif text == model.get("unk_token"):
            kind = gguf.TokenType.UNKNOWN
        listed.append((text, token["id"], kind))
    for token, index, kind in listed:
        if not 0 <= index < size:
            raise ModelLoadError(
                f"tokenizer.json has a token {index} where config.json speaks of {size}; the directory mixes two "
                "models, fetch the model again."
            )
        tokens[index], types[index] = token, int(kind)
    return tokens, types


def scores(tokens: Sequence[str], merges: Iterable[tuple[str, ...]]) -> list[float]:
    """By which the merge that comes first in `merges` has the highest; what no merge makes has the lowest."""
    first: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        first.setdefault("".join(merge), rank)
    last = float(len(first) + len(tokens))
    return [-float(first[token]) if token in first else -last for token in tokens]


def space_prefix(tokenizer: Mapping[str, Any]) -> bool:
    """Whether texts get a space in front, of SentencePiece's tokenizers. Raises `ModelLoadError` for other rules."""
    normalizer, splitter = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    rules = [(step["type"], step.get("content") or step.get("prepend")) for step in steps]
    kind = (splitter.get("type"), splitter.get("replacement"), splitter.get("split", True))
    if not rules and kind == ("Metaspace", _SPACE, False):
        return bool(splitter.get("prepend_scheme", "always") != "never")
    harmless = not splitter or (splitter.get("type"), splitter.get("behavior")) == ("Split", "MergedWithPrevious")
    if harmless and rules in ([("Replace", _SPACE)], [("Prepend", _SPACE), ("Replace", _SPACE)]):
        return len(rules) > 1
    raise ModelLoadError(
        f"The tokenizer changes text by {', '.join(name for name, _ in rules) or 'nothing'} and splits it by "
        f"{splitter.get('type', 'nothing')} before merging, in a way that has no name in GGUF; convert to "
        "safetensors, or use llama.cpp's own converter."
    )


def pre_tokenizer(tokenizer: Mapping[str, Any]) -> str:
    """GGUF's name for how tokenizer.json splits text before merging. Raises `ModelLoadError` for others."""
    splitter = tokenizer.get("pre_tokenizer") or {}
    if name := split_name(splitter):
        return name
    kinds = [part.get("type") for part in splitter.get("pretokenizers", [splitter])]
    raise ModelLoadError(
        f"The tokenizer splits text by {', '.join(map(str, kinds))} in a way that has no name in GGUF here; convert to "
        "safetensors, or use llama.cpp's own converter."
    )


def _adds(tokenizer: Mapping[str, Any], tokens: Sequence[str], token: object) -> bool:
    """Whether texts get `token` in front."""
    processor = tokenizer.get("post_processor") or {}
    steps = processor.get("processors", [processor])
    templates = (step["single"] for step in steps if step.get("type") == "TemplateProcessing")
    single: list[dict[str, Any]] = next(templates, [])
    first = single[0].get("SpecialToken", {}).get("id") if single else None
    return isinstance(token, int) and first == tokens[token]


def _chat_templates(directory: Path) -> list[dict[str, str]]:
    """As tokenizer_config.json lists several: the one for all conversations, and the one for those with tools."""
    files = {name: directory / file for name, file in (("default", TEMPLATE), ("tool_use", TOOL_TEMPLATE))}
    if files["default"].is_file():
        found = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    else:
        settings = directory / CONFIG
        given = read_json(settings).get("chat_template") if settings.is_file() else None
        listed = given if isinstance(given, list) else [{"name": "default", "template": given}]
        found = {one["name"]: one["template"] for one in listed if one["name"] in files and one["template"]}
    return [{"name": name, "template": template} for name, template in found.items()]


def read_json(file: Path) -> dict[str, Any]:
    """Raises `ModelLoadError`."""
    try:
        content = json.loads(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        return content
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read ({error}); give a whole model directory.") from None
