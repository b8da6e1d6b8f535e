"""Structured output through the whole house: with the stub in every way there is, and with the real model."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from websockets.sync.client import connect as connect_socket

from shared.model_store.catalog import DEFAULT_MODEL
from tests.e2e.stack import Stack

pytestmark = pytest.mark.e2e

# Kills a compiler by its stack.
CHAIN = 'start: "x" r0\n' + "".join(f'r{at}: "x" r{at + 1}\n' for at in range(12_000)) + 'r12000: "a"'
LONG = "[a-z ]{120}"


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    name: str = Field(max_length=12)


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    married: bool
    pets: list[Pet] = Field(max_length=2)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two groups of the stub, slow enough to be interrupted."""
    directory = tmp_path_factory.mktemp("structured")
    arguments = ("--engine", "stub", "--no-smoke-test", "--replicas", "2")
    with Stack(directory, *arguments, RYZANSTEIN_STUB_STEP_MS="4") as stack:
        yield stack


class Client:
    """The official client of a stack, with the model and a question filled in."""

    def __init__(self, stack: Stack, model: str) -> None:
        self.http = httpx.Client(trust_env=False, timeout=120)
        self.openai = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, http_client=self.http)
        self.model, self.url = model, stack.url

    def body(self, **fields: Any) -> dict[str, Any]:
        question = {"role": "user", "content": "Describe a person as JSON."}
        return {"model": self.model, "messages": [question], "max_tokens": 600} | fields

    def ask(self, **fields: Any) -> Any:
        """A chat completion; fields of vLLM's too."""
        extra = {name: fields.pop(name) for name in list(fields) if name.startswith(("guided_", "structured_"))}
        return self.openai.chat.completions.create(**self.body(**fields), extra_body=extra)

    def text(self, **fields: Any) -> str:
        choice = self.ask(**fields).choices[0]
        assert choice.finish_reason == "stop"
        return str(choice.message.content)

    def stream(self, request_id: str = "", **fields: Any) -> Iterator[str]:
        for chunk in self.ask(stream=True, extra_headers={"x-request-id": request_id or "r"}, **fields):
            yield chunk.choices[0].delta.content or ""


@pytest.fixture
def client(stub: Stack) -> Iterator[Client]:
    made = Client(stub, "stub")
    yield made
    made.http.close()


def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": kind.model_json_schema()}}


# --- the stub ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_official_client_parses_into_pydantic_models(client: Client) -> None:
    for seed in range(4):
        reply = client.openai.chat.completions.parse(**client.body(max_tokens=2000, seed=seed), response_format=Person)
        assert isinstance(reply.choices[0].message.parsed, Person)


@pytest.mark.slow
def test_the_pages_example(stub: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found: dict[str, Any] = {}
    exec(example.replace("http://127.0.0.1:8000", stub.url), found)
    assert isinstance(found["person"], found["Person"])
    assert found["choice"] in ("yes", "no")
    found["client"].close()


def test_every_choice_is_held_to_the_form(client: Client) -> None:
    reply = client.ask(n=4, guided_regex=r"\d{2}-[a-f]{5}", logprobs=True, top_logprobs=2, logit_bias={"65": 5})
    texts = {choice.message.content for choice in reply.choices}
    assert len(texts) == 4
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(r"\d{2}-[a-f]{5}", choice.message.content)
        assert "".join(item.token for item in choice.logprobs.content) == choice.message.content


def test_completions_and_json_objects(client: Client) -> None:
    reply = client.openai.completions.create(
        model="stub", prompt="x", max_tokens=9, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert reply.choices[0].text in ("yes", "no")
    assert isinstance(json.loads(client.text(response_format={"type": "json_object"}, seed=3)), dict)
    assert client.text(guided_grammar='root ::= "a" [0-9]')[:1] == "a"


def test_a_cut_text_ends_with_length_and_a_stop_string_still_stops(client: Client) -> None:
    cut = client.ask(guided_regex=LONG, max_tokens=10).choices[0]
    assert (cut.finish_reason, len(cut.message.content)) == ("length", 10)
    whole = client.text(guided_regex=LONG, seed=5)
    stopped = client.text(guided_regex=LONG, seed=5, stop=[whole[30:33]])
    assert stopped == whole[: whole.index(whole[30:33])]


@pytest.mark.slow
def test_streams_sockets_repeats_and_resumed_streams_say_the_same(client: Client) -> None:
    fields = {"seed": 11, "guided_regex": LONG}
    whole = client.text(**fields)
    assert "".join(client.stream(**fields)) == whole
    with connect_socket(client.url.replace("http", "ws") + "/v1/stream", proxy=None) as socket:
        socket.send(json.dumps({"type": "generate", "id": "a", "request": client.body(**fields)}))
        said = ""
        while (message := json.loads(socket.recv(30)))["type"] != "done":
            said += message["chunk"]["choices"][0]["delta"].get("content") or "" if "chunk" in message else ""
        assert said == whole
    ids = set()
    for _ in range(2):
        reply = client.http.post(
            f"{client.url}/v1/chat/completions", json=client.body(**fields), headers={"Idempotency-Key": "k1"}
        ).json()
        ids.add((reply["id"], reply["choices"][0]["message"]["content"]))
    assert [text for _, text in ids] == [whole]


def test_a_text_goes_on_where_its_ring_was_killed(client: Client, stub: Stack) -> None:
    """The other group replays the tokens in the grammar; the text is the undisturbed one."""
    fields: dict[str, Any] = {"seed": 13, "guided_regex": LONG}
    whole = client.text(**fields)
    ranks = {group["group"][-1]: group["ranks"][0]["pid"] for group in stub.status()["groups"]}
    said = []
    for piece in client.stream("killed", **fields):
        said.append(piece)
        if len(said) == 8:
            [executor] = stub.group_of("killed")  # its number is its group's
            os.kill(ranks[executor[-1]], signal.SIGKILL)
    assert "".join(said) == whole
    assert len(said) > 8


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "unknown name"),
    ({"guided_grammar": CHAIN}, "guided_grammar", "too complex"),
    ({"guided_grammar": "start: <|nope|>"}, "response_format", "unknown special token"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
     "response_format", "Invalid schema for response_format 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_bad_grammars_are_refused_and_the_house_stands(
    client: Client, stub: Stack, fields: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.ask(stream=stream, **fields)
        assert (caught.value.param, caught.value.code) == (param, "invalid_grammar")
        assert words in str(caught.value)
    assert client.text(guided_choice=["fine"]) == "fine"


# --- the real model ------------------------------------------------------------------------------

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": 10, "maximum": 99},
     "ok": {"type": "boolean"}}, "required": ["n", "ok"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 2, "maxItems": 4},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date"},
     "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]+$", "maxLength": 8}}, "required": ["when", "code"],
     "additionalProperties": False},
    {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "number"}, {"type": "null"}]},
]  # fmt: skip


@pytest.mark.nightly
def test_the_model_keeps_to_schemas_however_hot_it_samples(two_groups: Stack) -> None:
    client = Client(two_groups, DEFAULT_MODEL)
    checked = 0
    for number, schema in enumerate(SCHEMAS):
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        reply = client.ask(response_format=form, temperature=2, n=3, seed=number, max_tokens=80)
        for choice in reply.choices:
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.message.content), schema)
                checked += 1
    assert checked > 5, "the others ran into their limit"
    for pattern in (r"[0-9]{3}-[a-z]{2,5}", r"(yes|no), (I|we) (do|do not)\."):
        for choice in client.ask(guided_regex=pattern, temperature=2, n=3, seed=1).choices:
            assert re.fullmatch(pattern, choice.message.content)
    client.http.close()


@pytest.mark.slow
def test_the_model_answers_into_a_pydantic_model(two_groups: Stack) -> None:
    client = Client(two_groups, DEFAULT_MODEL)
    reply = client.openai.chat.completions.parse(**client.body(temperature=0), response_format=Person)
    assert isinstance(reply.choices[0].message.parsed, Person)
    client.http.close()


@pytest.mark.nightly
@pytest.mark.parametrize(("temperature", "seed"), [pytest.param(0.0, None, marks=pytest.mark.nightly), (1.0, 7)])
def test_one_rank_two_ranks_and_a_failover_give_the_same_text(
    two_groups: Stack, one_ring_of_two: Stack, temperature: float, seed: int | None
) -> None:
    fields: dict[str, Any] = {
        "response_format": schema_of(Person),
        "temperature": temperature,
        "seed": seed,
        "max_tokens": 32,
    }
    one, two = Client(two_groups, DEFAULT_MODEL), Client(one_ring_of_two, DEFAULT_MODEL)
    expected = one.ask(**fields).choices[0].message.content
    assert two.ask(**fields).choices[0].message.content == expected
    ranks = one_ring_of_two.status()["groups"][0]["ranks"]
    said = []
    for piece in two.stream(**fields):
        said.append(piece)
        if len(said) == 5:
            os.kill(ranks[1]["pid"], signal.SIGKILL)
    assert "".join(said) == expected
    for client in (one, two):
        client.http.close()
