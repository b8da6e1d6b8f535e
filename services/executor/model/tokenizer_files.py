"""The tokenizer's files of a model directory, as they travel to the gateways.

What the libraries pass over in silence is refused by name: fields that tokenizer.json lacks or that a file has twice,
tokens that get other ids than the file says, templates that are none.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.errors import ModelLoadError
from shared.messages import TokenizerBundle

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
_FILES = (TOKENIZER, CONFIG, TEMPLATE, TOOL_TEMPLATE, SPECIAL_TOKENS, "config.json", "generation_config.json")
# Of tokenizer.json: null where there is none, and never left out.
_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Added(NamedTuple):
    """A token beside the vocabulary."""

    where: Path
    text: str
    token: int


def read_bundle(directory: Path, *, checked: bool = False) -> bytes:
    """The tokenizer's files, as they travel. `checked`: tokenizer.json can be used, which takes seconds to find out.
    Raises `ModelLoadError`."""
    files = {name: (directory / name).read_bytes() for name in _FILES if (directory / name).is_file()}
    if TOKENIZER not in files:
        raise ModelLoadError(
            f"The directory {directory} has no tokenizer.json, which gateways need; save the model's fast "
            "tokenizer there (AutoTokenizer.from_pretrained(...).save_pretrained(...))."
        )
    parsed = {name: read_json(directory / name) for name in files if name.endswith(".json") and name != TOKENIZER}
    if TOOL_TEMPLATE in files and TEMPLATE not in files:
        raise ModelLoadError(
            f"The directory {directory} has {TOOL_TEMPLATE} and no {TEMPLATE}; fetch the model again, or add the file."
        )
    config = parsed.get(CONFIG, {})
    inner = list(_templates(directory / CONFIG, config.get("chat_template")))
    sources = [files[name].decode(errors="replace") for name in (TEMPLATE, TOOL_TEMPLATE) if name in files]
    special = _special_tokens(directory, config, parsed.get(SPECIAL_TOKENS, {}))
    added = list(_added_tokens(directory, config))
    if not checked:
        _check_tokenizer(directory / TOKENIZER, special, added, sources or inner)
    return msgspec.msgpack.encode(TokenizerBundle(files))


def check_templates(directory: Path) -> None:
    """Raises `ModelLoadError` where a chat template is none."""
    files = (directory / name for name in (TEMPLATE, TOOL_TEMPLATE))
    found = [(file, file.read_text(encoding="utf-8", errors="replace")) for file in files if file.is_file()]
    config = directory / CONFIG
    found = found or [(config, one) for one in _templates(config, read_json(config).get("chat_template"))]
    if not found:
        return
    from services.executor.model.chat_templates import problem_with  # with jinja2, for models that have a template

    for file, template in found:
        if problem := problem_with(template):
            raise _unusable(file, "the chat template", problem)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty: there is no file. Raises `ModelLoadError`."""
    if not path.is_file():
        return {}

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        for name, value in pairs if len(found) < len(pairs) else ():
            if found[name] != value:
                raise ModelLoadError(
                    f"The file {path} says {name[:128]!r} twice, and not the same; fetch the model again."
                )
        return found

    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=once)
    except ValueError as error:
        raise ModelLoadError(f"The file {path} is not JSON ({error}); fetch the model again.") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"The file {path} is not a JSON object; fetch the model again.")
    return content


def _templates(path: Path, given: Any) -> Iterable[str]:
    """Of tokenizer_config.json: a text, or several by name."""
    if given is None:
        return
    if isinstance(given, str):
        yield given
        return
    named: dict[str, str] = {}
    for entry in given if isinstance(given, list) else [None]:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise _unusable(path, "chat_template", "is neither a text nor a list of names and templates")
        if named.setdefault(name, template) != template:
            raise _unusable(path, f"chat_template {name[:64]!r}", "stands there twice, and not the same")
        yield template
    if "default" not in named:
        raise _unusable(path, "chat_template", "has no template that is called 'default'")


def _special_tokens(directory: Path, config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """The texts of special tokens, by their fields; from where transformers has them."""
    files = {CONFIG: config}
    if "added_tokens_decoder" not in config:
        files[SPECIAL_TOKENS] = special_map
    found: dict[str, str] = {}
    for file, fields in files.items():
        for name in _SPECIAL:
            value = fields.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if value is not None and not isinstance(text, str):
                raise _unusable(directory / file, name, "is no text of a token")
            if text:
                found[name] = text
    return found


def _added_tokens(directory: Path, config: Mapping[str, Any]) -> Iterable[Added]:
    """Which transformers adds to those of tokenizer.json."""
    if "added_tokens_decoder" in config:
        where, given = directory / CONFIG, config["added_tokens_decoder"]
        named = given.items() if isinstance(given, dict) else [("", None)]
        pairs = [(one.get("content") if isinstance(one, dict) else None, token) for token, one in named]
    else:
        where = directory / ADDED_TOKENS
        pairs = list(read_json(where).items())
    for text, token in pairs:
        if not isinstance(text, str) or not str(token).isdecimal():
            raise _unusable(where, f"added_tokens_decoder {token!r:.40}", "is no token with its id")
        yield Added(where, text, int(token))


def _check_tokenizer(path: Path, special: Mapping[str, str], added: Iterable[Added], templates: Iterable[str]) -> None:
    """`special`: texts of tokens by the names that templates have for them."""
    said = read_json(path)
    if missing := next((name for name in _PARTS if name not in said), None):
        raise ModelLoadError(
            f"The file {path} does not say {missing!r}, without which texts become other tokens; fetch the model again."
        )
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
        own = [Added(path, str(one["content"]), int(one["id"])) for one in said["added_tokens"]]
    except Exception as error:  # the library raises bare exceptions
        raise ModelLoadError(f"The file {path} cannot be used ({error}); fetch the model again.") from None
    for where, text, token in (*own, *added):
        if (found := tokenizer.token_to_id(text)) != token:
            would = "is no token of tokenizer.json" if found is None else f"would get {found}"
            raise _unusable(where, f"the token {text[:64]!r}", f"has the id {token} there and {would}")
    for name, text in special.items():
        written = any(re.search(rf"\b{name}\b", template) for template in templates)
        if written and tokenizer.token_to_id(text) is None:
            raise _unusable(path, f"{name} {text[:64]!r}", "is written by the chat template and is no token there")


def _unusable(path: Path, what: str, why: str) -> ModelLoadError:
    return ModelLoadError(f"The file {path} cannot be used: {what} {why}; fetch the model again.")
