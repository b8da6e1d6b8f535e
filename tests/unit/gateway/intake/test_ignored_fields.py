"""Bodies in another form than ours, and fields that change nothing."""

import json
from typing import Any

import msgspec
import pytest

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake import headers
from services.gateway.intake.decoding import decode
from services.gateway.intake.prompts.chat import plan_of
from services.gateway.intake.prompts.kv_cache import cache_salt
from services.gateway.intake.record import truncated
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.intake.validation import check_chat, ignored_fields
from services.gateway.tokenizer.templates import Traits
from shared.messages import ModelCard

CARD = ModelCard("m", 100, 256, [], "", 0)
_chat = msgspec.json.Decoder(ChatCompletionRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


def chat(message: dict[str, Any] | None = None, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": "hi", **(message or {})}]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def test_a_byte_order_mark_is_no_fault() -> None:
    assert decode(b"\xef\xbb\xbf" + chat(), _chat).model == "m"


def test_a_whole_number_may_have_a_fraction_of_zeros() -> None:
    body = b'{"model": "1.0", "prompt": [[1.0, 2.00], [3]], "max_tokens": 6.0, "n": 2.0, "top_p": 1.0, "seed": -3.0}'
    got = decode(body, _completion)
    assert (got.model, got.prompt, got.max_tokens, got.n, got.seed) == ("1.0", [[1, 2], [3]], 6, 2, -3)
    for written, meant in ((b"6e0", 6), (b"1E2", 100), (b"60e-1", 6), (b"6.0E+1", 60), (b"1.5e1", 15), (b"0e9", 0)):
        body = b'{"model": "m", "prompt": "a", "max_tokens": %b}' % written
        assert decode(body, _completion).max_tokens == meant
    with pytest.raises(InvalidParameter, match="'max_tokens': expected an integer, but got a number with a fraction"):
        decode(b'{"model": "m", "prompt": "a", "max_tokens": 6.5}', _completion)
    for wrong in (b"6.5", b"6.01", b'"6.0"', b"6.", b"[6.0]", b"65e-1", b"1e400", b"1e99", b"1e99999999999999999"):
        with pytest.raises(InvalidParameter):
            decode(b'{"model": "m", "prompt": "a", "max_tokens": %b}' % wrong, _completion)


def test_unknown_fields_of_messages_are_left_out_and_named() -> None:
    dropped: list[str] = []
    body = chat({"weight": 1, "reasoning": "so", "made\n": 2}, max_tokens=6.0)
    got = decode(body, _chat, dropped)
    assert got.messages[0].reasoning_content == "so"
    assert dropped == ["messages[].weight", "messages[].made\n"]
    answer: dict[str, str] = {}
    headers.tell_ignored(dropped * 2, answer, strict=False)
    headers.tell_ignored((f"x{number}" for number in range(99)), answer, strict=False)
    names = answer[headers.IGNORED_HEADER].split(", ")
    assert names[:2] == ["messages[].weight", "messages[].made?"]
    assert len(names) == headers.MOST_IGNORED
    with pytest.raises(InvalidParameter, match=r"messages\[0\]\.weight"):
        decode(body, _chat)
    with pytest.raises(InvalidParameter, match="surprise"):
        decode(chat(surprise=1), _chat, [])


def test_what_changes_nothing_is_named_and_refused_where_that_is_set() -> None:
    request = decode(chat(length_penalty=2, spaces_between_special_tokens=True), _chat)
    assert ignored_fields(request) == ["length_penalty"]
    with pytest.raises(InvalidParameter, match="length_penalty"):
        headers.tell_ignored(ignored_fields(request), {}, strict=True)
    for field, value in (("chat_template", "{{ x }}"), ("use_beam_search", True), ("documents", [{}])):
        with pytest.raises(InvalidParameter, match=field):
            check_chat(decode(chat(**{field: value}), _chat))


def test_what_a_template_does_not_look_at_is_ignored() -> None:
    request = decode(chat(chat_template_kwargs={"enable_thinking": False, "style": 1}), _chat)
    plan = plan_of(request, CARD, Traits(variables=frozenset({"style"})))
    assert plan.options.variables == {"style": 1}
    assert plan.ignored == ("chat_template_kwargs.enable_thinking",)


def test_a_prompt_is_cut_on_the_side_that_was_named() -> None:
    def cut(**fields: Any) -> list[int]:
        body = json.dumps({"model": "m", "prompt": "a", "truncate_prompt_tokens": 2, **fields}).encode()
        return truncated(decode(body, _completion), CARD, [1, 2, 3])

    assert cut() == cut(truncation_side="left") == [2, 3]
    assert cut(truncation_side="right") == [1, 2]


def test_salts_part_caches() -> None:
    salts = {cache_salt(given, tenant) for given in (None, "a", "b") for tenant in ("", "acme", "other")}
    assert len(salts) == 9
    assert cache_salt(None, "") == cache_salt("", "") == ""


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "é", "a\n"])
def test_a_request_id_is_one_word(name: str) -> None:
    with pytest.raises(InvalidParameter, match="request_id") as caught:
        decode(chat(request_id=name), _chat)
    assert (caught.value.param, caught.value.reason) == ("request_id", "invalid_value")
    assert decode(chat(request_id="mine-1"), _chat).request_id == "mine-1"
