"""A model is served with the tokenizer, templates and sampling defaults of its own directory, as transformers has them,
or refused by the name of what is not right: files and their fields, left out, doubled and misnamed."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, PreTrainedTokenizerFast

from services.executor.core.engine import EngineSpec
from services.executor.model.card import DEFAULTS, read_card
from services.executor.model.tokenizer_files import check_templates
from services.gateway.tokenizer.templates import templates_of
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from shared.errors import ModelLoadError
from shared.messages import TokenizerBundle
from tests.unit.gateway.tokenizer.tiny_tokenizer import TEMPLATE, tiny_files

SPEC = EngineSpec(num_blocks=1, block_size=16, vocab_size=258, context_length=256)
TEXT = "Hi <|start|>you"
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
GENERATION = {
    "eos_token_id": [1, 0],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
}
TOOLS = "{{ bos_token }}tools " + TEMPLATE

Object = list[tuple[str, Any]]  # a JSON object whose fields may be doubled


class Served(NamedTuple):
    tokens: list[int]
    templates: tuple[str | None, str | None]  # without and with tools
    special: dict[str, str]
    ends: list[int]
    defaults: dict[str, float]


def whole(form: str) -> dict[str, Object | str]:
    """The files of a model, whose templates lie in them in that form."""
    files = tiny_files()
    config = json.loads(files["tokenizer_config.json"])
    tokenizer = json.loads(files["tokenizer.json"])
    tokenizer["truncation"] = None
    config["eos_token"] = {"__type": "AddedToken", "content": "<|end|>", "special": True}
    found: dict[str, Object | str] = {
        "tokenizer.json": list(tokenizer.items()),
        "special_tokens_map.json": [("bos_token", "<|start|>"), ("pad_token", {"content": "<|end|>"})],
        "config.json": [("model_type", "llama"), ("eos_token_id", 0)],
        "generation_config.json": list(GENERATION.items()),
    }
    match form:
        case "text":
            config["chat_template"] = TEMPLATE
        case "named":
            named = {"default": TEMPLATE, "tool_use": TOOLS}
            config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        case "in files":
            config["chat_template"] = "of a version before"
            found["chat_template.jinja"] = TEMPLATE
            found["additional_chat_templates/tool_use.jinja"] = TOOLS
        case "decoded":
            config["chat_template"] = TOOLS
            config["added_tokens_decoder"] = {"0": {"content": "<|start|>", "special": True}}
        case _:
            found["added_tokens.json"] = [("<|start|>", 0), ("<|end|>", 1)]
    found["tokenizer_config.json"] = list(config.items())
    return found


def write(directory: Path, files: dict[str, Object | str]) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json_of(content)
        path.write_text(text)


def json_of(fields: Object) -> str:
    return "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields) + "}"


def served(directory: Path) -> Served | str:
    """What is served, or why nothing is."""
    try:
        card, bundle = read_card(directory, "m", SPEC)
    except ModelLoadError as error:
        return str(error)
    files = msgspec.msgpack.decode(bundle, type=TokenizerBundle).files
    templates = templates_of(files)
    tokenizer = ModelTokenizer(files, special_tokens_in_messages=True)
    return Served(
        tokenizer._encode([TEXT], special=True)[0],
        (templates.source, templates.with_tools) if templates else (None, None),
        {name: text for name, text in (templates.special_tokens if templates else {}).items() if name in SPECIAL},
        card.eos_token_ids,
        card.defaults,
    )


def known(directory: Path) -> Served:
    """The same, as transformers has it."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory))
    found = tokenizer.chat_template
    if isinstance(found, dict):
        templates = (found["default"], found.get("tool_use", found["default"]))
    else:
        templates = (found, found)
    generation = json.loads((directory / "config.json").read_text()) if (directory / "config.json").exists() else {}
    given: dict[str, Any] = {"eos_token_id": generation.get("eos_token_id")}
    if (directory / "generation_config.json").exists():
        own = GenerationConfig.from_pretrained(str(directory)).to_diff_dict()
        given |= {name: value for name, value in own.items() if value is not None}
    ends = given["eos_token_id"]
    special = {name: text for name, text in tokenizer.special_tokens_map.items() if name in SPECIAL}
    return Served(
        tokenizer(TEXT)["input_ids"],
        templates,
        special if found else {},
        [ends] if isinstance(ends, int) else ends or [],
        {name: given[name] for name in DEFAULTS if name in given},
    )


def misnamed(name: str) -> str:
    return f"{name[:-1]}x{name[-1]}"


def other_than(value: Any) -> Any:
    """A value of that kind which is another one."""
    match value:
        case str():
            return f"x{value}" if "{" in value else misnamed(value)
        case bool() | None:
            return not value
        case int() | float():
            return value + 1000
        case list():
            return [other_than(value[0]), *value[1:]] if value else [{}]
        case dict():
            return {**value, "content": "<|strange|>"} if "content" in value else {}
    return None


FIELDS: dict[str, Callable[[str, Any], Object]] = {
    "left out": lambda name, value: [],
    "misnamed": lambda name, value: [(misnamed(name), value)],
    "doubled": lambda name, value: [(name, value), (name, value)],
    "doubled otherwise": lambda name, value: [(name, value), (name, other_than(value))],
    "of another value": lambda name, value: [(name, other_than(value))],
    "of another kind": lambda name, value: [(name, 17 if isinstance(value, str | dict | list) else "much")],
}
FORMS = ("text", "named", "in files", "decoded", "plain")


def check(form: str, file: str, at: int, change: str) -> None:
    files = whole(form)
    content = files[file]
    if isinstance(content, str) or at < 0:
        names = (file, misnamed(file))
        del files[file]
        if change != "left out":
            files[misnamed(file)] = content
    else:
        name, value = content[at % len(content)]
        names = (name, file)
        content[at % len(content)] = ("", None)
        files[file] = [
            pair for one in content for pair in (FIELDS[change](name, value) if one == ("", None) else [one])
        ]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write(directory, files)
        found = served(directory)
        if isinstance(found, str):
            assert any(name in found for name in names), found
        else:
            assert found == known(directory)


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_directory_is_served(tmp_path: Path, form: str) -> None:
    write(tmp_path, whole(form))
    found = served(tmp_path)
    assert isinstance(found, Served), found
    assert found == known(tmp_path)
    if form == "plain":
        assert found.templates == (None, None)
        return
    assert found.templates == (TOOLS if form == "decoded" else TEMPLATE, TEMPLATE if form == "text" else TOOLS)
    assert (found.ends, found.defaults) == ([1, 0], {name: GENERATION[name] for name in DEFAULTS})


@given(data=st.data())
@settings(max_examples=80)
def test_a_directory_is_served_as_it_is_or_refused_by_name(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMS))
    file = data.draw(st.sampled_from(sorted(whole(form))))
    check(form, file, data.draw(st.integers(-2, 12)), data.draw(st.sampled_from(sorted(FIELDS))))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_template_is_refused_before_weights_are_read(tmp_path: Path, form: str) -> None:
    write(tmp_path, whole(form))
    check_templates(tmp_path)
    file = tmp_path / ("chat_template.jinja" if form == "in files" else "tokenizer_config.json")
    file.write_text(file.read_text().replace("{%", "{% nope %}{%"))
    if form != "plain":
        with pytest.raises(
            ModelLoadError, match=rf"{file.name} cannot be used: the chat template is no Jinja template"
        ):
            check_templates(tmp_path)
