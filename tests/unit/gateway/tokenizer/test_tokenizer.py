"""Text to tokens and back."""

import json

import pytest

from services.gateway.core.errors import InvalidParameter
from services.gateway.tokenizer.encoding import INLINE
from services.gateway.tokenizer.templates import tokenizer_info
from services.gateway.tokenizer.tokenizer import ModelTokenizer, StubTokenizer
from shared.errors import InternalError
from shared.limits import TOKENIZER_INFO
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("in_config", [False, True])
async def test_a_conversation_is_rendered_without_more_special_tokens(in_config: bool) -> None:
    tokenizer = ModelTokenizer(tiny_files(in_config=in_config))
    prompt = await tokenizer.encode_rendered(await tokenizer.render_chat(CHAT))
    text = b"".join(map(tokenizer.token_bytes, prompt)).decode()
    assert text == ("<|start|>system\nBe kind.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n")
    assert prompt[0] == 0


async def test_plain_text_gets_the_models_special_tokens_and_is_never_cut() -> None:
    tokenizer = ModelTokenizer(tiny_files())
    prompt = await tokenizer.encode("x" * (INLINE + 1))
    assert prompt[0] == 1
    assert len(prompt) == INLINE + 2


async def test_half_a_character_is_never_shown() -> None:
    tokenizer = ModelTokenizer(tiny_files())
    text = "na\u00efve \U0001f600!"
    tokens = (await tokenizer.encode(text))[1:]
    detokenizer = tokenizer.detokenizer([], skip_special_tokens=True)
    pieces = [detokenizer.feed([token]) for token in tokens]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces
    after = tokenizer.detokenizer(tokens[:4], skip_special_tokens=True)
    assert after.feed(tokens[4:]) == text[3:]
    within = tokenizer.detokenizer(tokens[:3], skip_special_tokens=True)
    assert within.feed(tokens[3:]) == "\ufffd" + text[3:]  # the prompt is not repeated


async def test_what_is_left_of_a_character_is_shown_at_the_end() -> None:
    tokenizer = ModelTokenizer(tiny_files())
    tokens = (await tokenizer.encode("\U0001f600"))[1:]
    detokenizer = tokenizer.detokenizer([], skip_special_tokens=True)
    assert detokenizer.feed(tokens[:3]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    skipped = tokenizer.detokenizer([], skip_special_tokens=True)
    skipped.feed([1])
    assert skipped.flush() == ""


async def test_special_tokens_are_shown_on_request() -> None:
    tokenizer = ModelTokenizer(tiny_files())
    tokens = [*(await tokenizer.encode("a"))[1:], 1]
    assert tokenizer.detokenizer([], skip_special_tokens=True).feed(tokens) == "a"
    assert tokenizer.detokenizer([], skip_special_tokens=False).feed(tokens) == "a<|end|>"


def test_bytes_of_tokens() -> None:
    tokenizer = ModelTokenizer(tiny_files())
    assert tokenizer.token_bytes(1) == b"<|end|>"
    assert tokenizer.token_bytes(10_000) == b""
    assert sorted(tokenizer.token_bytes(token) for token in range(2, 258)) == [bytes([byte]) for byte in range(256)]


async def test_a_model_without_a_template_points_to_completions() -> None:
    tokenizer = ModelTokenizer(tiny_files(template=None))
    with pytest.raises(InvalidParameter, match="/v1/completions"):
        await tokenizer.encode_rendered(await tokenizer.render_chat(CHAT))


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages.append(1) }}", "messages"),
        ("{{ ''.__class__.__mro__ }}", "chat template"),
    ],
)
async def test_what_a_template_refuses_is_told(template: str, shown: str) -> None:
    tokenizer = ModelTokenizer(tiny_files(template=template))
    with pytest.raises(InvalidParameter, match=shown):
        await tokenizer.encode_rendered(await tokenizer.render_chat(CHAT))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("{% generation %}{{ bos_token }}{% endgeneration %}", "<|start|>"),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "Hi"}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("  {% if tools is none %}\nno tools{% endif %}", "no tools"),
    ],
)
async def test_what_templates_may_use(template: str, text: str) -> None:
    tokenizer = ModelTokenizer(tiny_files(template=template))
    prompt = await tokenizer.encode_rendered(await tokenizer.render_chat(CHAT))
    assert b"".join(map(tokenizer.token_bytes, prompt)).decode() == text


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.json": b"{}"},
        {"tokenizer.json": b"\xff"},
        {"tokenizer_config.json": b"["},
        {"chat_template.jinja": b"{% if %}"},
    ],
)
def test_broken_files(change: dict[str, bytes]) -> None:
    with pytest.raises(InternalError, match="cannot be used"):
        ModelTokenizer(tiny_files() | change)
    with pytest.raises(InternalError, match=r"lacks tokenizer\.json"):
        ModelTokenizer({})


async def test_pairs_are_joined_as_the_model_wants_them() -> None:
    """BERT's second text is of another segment; a model that tells none apart has one."""
    files = tiny_files()
    described = json.loads(files["tokenizer.json"])
    for second, segment in ((1, 4), (0, 0)):
        described["post_processor"]["pair"] = [
            {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": second}},
            {"SpecialToken": {"id": "<|end|>", "type_id": second}},
        ]
        tokenizer = ModelTokenizer(files | {"tokenizer.json": json.dumps(described).encode()})
        (pair, other) = await tokenizer.encode_pairs([("ab", "c"), ("ab", "")])
        first = await tokenizer.encode("ab")
        assert pair.tokens[:4] == [*first, 1]
        assert (len(pair.tokens), pair.second_segment) == (6, segment)
        assert other.tokens == [*first, 1, 1]
    assert await StubTokenizer().encode_pairs([("ab", "c")]) == [(list(b"ab\nc"), 3)]


async def test_the_stub_is_bytes() -> None:
    stub = StubTokenizer()
    assert await stub.encode_rendered(await stub.render_chat(CHAT)) == list(b"Be kind.\nHi\n")
    assert stub.detokenizer([], skip_special_tokens=True).feed([0x41, 0x1E9]) == "A\xe9"
    assert stub.token_bytes(0x41) == b"A"


def test_what_is_told_of_a_tokenizer_is_bounded_and_says_nothing_of_its_place() -> None:
    files = tiny_files()
    config = json.loads(files["tokenizer_config.json"]) | {"name_or_path": "/home/me/model", "model_max_length": 8}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    told = json.loads(tokenizer_info(files))
    assert told == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"content": "<|end|>"},
        "bos_token": "<|start|>",
        "model_max_length": 8,
        "chat_template": files["chat_template.jinja"].decode(),
    }
    large = {"added_tokens_decoder": {str(number): {"content": "x" * 99} for number in range(4096)}}
    many = {f"field_{number}": "x" * 9 for number in range(12_000)}
    for more, omitted in ((large, ["added_tokens_decoder"]), (large | many, None)):
        files["tokenizer_config.json"] = json.dumps(config | more).encode()
        data = tokenizer_info(files)
        assert len(data) <= TOKENIZER_INFO.value + 1024
        told = json.loads(data)
        assert omitted is None or told["omitted_fields"] == omitted
        assert told["omitted_fields"][0] == "added_tokens_decoder"
