"""/tokenize and /detokenize over HTTP, with the stub's tokens and with a model's."""

from typing import Any

import httpx
import pytest

from shared import subjects
from shared.bus import Bus, encode
from shared.messages import TokenizerBundle
from shared.stores import ObjectStore
from tests.integration.gateway.fake_ring import MODEL, FakeRing, stub_card
from tests.integration.gateway.test_rest import until_listed
from tests.unit.gateway.tiny_tokenizer import tiny_files

HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def tiny(http: httpx.AsyncClient, ring: FakeRing, bus: Bus) -> str:
    """A model with a byte-level tokenizer: 0 and 1 are <|start|> and <|end|>."""
    await ObjectStore(bus, subjects.TOKENIZERS_STORE).put("tiny-files", encode(TokenizerBundle(tiny_files())))
    await ring.add_model(stub_card("tiny", tokenizer="tiny-files", vocab_size=258))
    await until_listed(http, "tiny")
    return "tiny"


async def post(http: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    answer = await http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_there_and_back(http: httpx.AsyncClient, tiny: str, prefix: str) -> None:
    made = await post(http, f"{prefix}/tokenize", model=tiny, prompt="Hé", return_token_strs=True)
    assert made["token_strs"] == ["<|end|>", "H", "Ã", "©"]
    assert (made["count"], made["max_model_len"]) == (4, 2048)
    back = await post(http, f"{prefix}/detokenize", model=tiny, tokens=made["tokens"])
    assert back == {"prompt": "<|end|>Hé"}
    plain = await post(http, f"{prefix}/tokenize", model=tiny, prompt="Hé", add_special_tokens=False)
    assert plain["tokens"] == made["tokens"][1:]
    assert plain["token_strs"] is None


async def test_a_conversation_is_what_a_chat_would_be_asked_with(http: httpx.AsyncClient, tiny: str) -> None:
    for fields, text in (
        ({}, "<|start|>user\nHi<|end|>\n<|start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|start|>user\nHi<|end|>\n"),
        ({"continue_final_message": True}, "<|start|>user\nHi"),
    ):
        made = await post(http, "/tokenize", model=tiny, messages=HELLO, **fields)
        assert (await post(http, "/detokenize", model=tiny, tokens=made["tokens"]))["prompt"] == text


async def test_the_model_may_be_left_out_where_there_is_one(http: httpx.AsyncClient, ring: FakeRing) -> None:
    made = await post(http, "/tokenize", prompt="Hi", return_token_strs=True)
    assert (made["tokens"], made["token_strs"]) == ([72, 105], ["H", "i"])
    assert await post(http, "/v1/detokenize", tokens=[72, 105]) == {"prompt": "Hi"}
    await ring.add_model(stub_card("another"))
    await until_listed(http, "another")
    answer = await http.post("/tokenize", json={"prompt": "Hi"})
    assert answer.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "x", "truncate": 1}, "truncate"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "cat", "content": "x"}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)
async def test_bad_requests_are_refused(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    for prefix in ("", "/v1"):
        answer = await http.post(prefix + path, json={"model": MODEL} | fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    assert (await http.post(path, json={"model": "nobody", "prompt": "x", "tokens": []})).status_code in (
        400,
        404,
    )
