"""Markers that are special tokens reach the parser; other special tokens stay hidden."""

import json

from tokenizers import AddedToken, Tokenizer

from services.gateway.tokenizer.special_tokens import SpecialText
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from services.gateway.tool_calls.families import markers_of
from services.gateway.tool_calls.parsers import harmony
from shared.messages.records import Parsing
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files
from tests.unit.gateway.tool_calls.templates import LLAMA31, MISTRAL


def tokenizer_with(*markers: str, template: str = MISTRAL, in_config: bool = False) -> ModelTokenizer:
    files = tiny_files(template=None if in_config else template)
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    files["tokenizer.json"] = tokenizer.to_str().encode()
    if in_config:
        config = json.loads(files["tokenizer_config.json"])
        plain = {"name": "default", "template": "{{ messages[0].content }}"}
        config["chat_template"] = [plain, {"name": "tool_use", "template": template}]
        files["tokenizer_config.json"] = json.dumps(config).encode()
    return ModelTokenizer(files)


def test_only_the_markers_are_shown() -> None:
    tokenizer = tokenizer_with("[TOOL_CALLS]", "<pad>")
    ids = tokenizer.specials(["[TOOL_CALLS]", "<pad>", "[ARGS]"])
    assert ids.keys() == {"[TOOL_CALLS]", "<pad>"}
    text = [2 + index for index in range(3)]
    plain = tokenizer.detokenizer([], skip_special_tokens=True).feed(text)
    tokens = [ids["<pad>"], text[0], ids["[TOOL_CALLS]"], *text[1:], 1]
    for markers, shown in (
        (markers_of(Parsing(tools="mistral")), f"{plain[0]}[TOOL_CALLS]{plain[1:]}"),
        (markers_of(Parsing(tools="hermes")), plain),
        (markers_of(None), plain),
    ):
        detokenizer = tokenizer.detokenizer([5], skip_special_tokens=True, keep=markers)
        assert "".join(detokenizer.feed([token]) for token in tokens) + detokenizer.flush() == shown


def test_tokens_with_a_checkpoints_suffix_are_shown() -> None:
    tokenizer = tokenizer_with("<tool_calls:a1>", "<pad>")
    ids = tokenizer.specials(["<tool_calls>"])
    assert ids.keys() == {"<tool_calls:a1>"}
    detokenizer = tokenizer.detokenizer([5], skip_special_tokens=True, keep=markers_of(Parsing(tools="hy_v3")))
    assert detokenizer.feed([ids["<tool_calls:a1>"], 1]) + detokenizer.flush() == "<tool_calls:a1>"


def test_tokens_of_messages_are_shown_to_the_parser_and_stay_text_in_messages() -> None:
    """gpt-oss' headers and ends; in what a client sends they begin no message, whoever is said to have said it."""
    assert set(harmony.TOKENS) <= markers_of(Parsing(reasoning="openai_gptoss"))
    assert set(harmony.TOKENS) <= markers_of(Parsing(tools="openai"))
    text = SpecialText(harmony.TOKENS)
    for role in ("user", "assistant", "system"):
        marked = text.marked([{"role": role, "content": "a<|end|>b"}], None, {})
        assert marked.messages[0]["content"] != "a<|end|>b"


async def test_traits_are_of_the_template_for_tools() -> None:
    tokenizer = tokenizer_with(template=LLAMA31, in_config=True)
    assert tokenizer.traits.family == "llama3_json"
    messages = [{"role": "user", "content": "Hi"}]
    assert (await tokenizer.render_chat(messages)).text == "Hi"
    assert "ipython" in (await tokenizer.render_chat(messages, [{"type": "function", "function": {"name": "f"}}])).text
