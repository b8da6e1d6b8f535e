"""What is compiled is kept, within bounds; what cannot be compiled is refused, and the ring lives."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from services.executor import structured_output as compiler_module
from services.executor.structured_output import GrammarCompiler, GrammarState, GrammarWork
from shared.errors import InternalError, InvalidGrammar, RyzansteinError
from shared.limits import GRAMMAR_BYTES
from shared.messages import GenerationRequest, Grammar, ModelCard, TokenizerBundle
from shared.nats.bus import encode
from tests.unit.executor.structured_output.guided_ring import CARD, ask
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

BAD: list[tuple[Grammar, str]] = [
    (Grammar("regex", "(a"), "unclosed group"),
    (Grammar("regex", "(?=a)b"), "look-around"),
    (Grammar("regex", ""), "it is empty"),
    (Grammar("lark", "\n"), "it is empty"),
    (Grammar("lark", "start: b"), "unknown name"),
    (Grammar("lark", "start: <|nope|>"), "unknown special token"),
    (Grammar("json_schema", "{"), "truncated"),
    (Grammar("json_schema", "[]"), "not a JSON object"),
    (Grammar("json_schema", '{"type":"objekt"}'), "objekt"),
    (Grammar("json_schema", '{"type":"array","uniqueItems":true}'), "uniqueItems"),
    (Grammar("json_schema", '{"$ref":"#/$defs/none"}'), "does not exist"),
    (Grammar("json_schema", '{"$ref":"http://127.0.0.1/x"}'), "http://127.0.0.1/x"),
    (Grammar("json_schema", '{"type":"integer","minimum":3,"maximum":2}'), "Unsatisfiable"),
    (Grammar("json_schema", '{"x-guidance":{"lenient":true},"not":{}}'), "not"),
    (Grammar("regex", "a" * (GRAMMAR_BYTES.value + 1)), "grammar_bytes"),
]


@pytest.mark.parametrize(("grammar", "reason"), BAD)
def test_what_does_not_compile_is_refused_with_the_reason(
    compiler: GrammarCompiler, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        compiler.start(ask(grammar))
    assert reason in caught.value.message
    assert len(caught.value.message) < 400
    assert "\n" not in caught.value.message
    assert not caught.value.retryable


def test_a_grammar_is_compiled_once() -> None:
    own = GrammarCompiler(compiler_module.Vocabulary.of(CARD, b""))
    try:
        first, second = (own.start(ask(Grammar("regex", "[ab]{3}"))) for _ in range(2))
        assert own.compiled == 1
        first.advance(*b"aba")
        assert (first.complete, second.complete) == (True, False), "each has a state of its own"
    finally:
        own.close()


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MOST_KEPT", 3)
    monkeypatch.setattr(compiler_module, "MOST_KEPT_BYTES", 100)
    own = GrammarCompiler(compiler_module.Vocabulary.of(CARD, b""))
    try:
        for letter in "abcab":
            own.start(ask(Grammar("regex", letter)))
        assert own.compiled == 3
        own.start(ask(Grammar("regex", "d")))  # c has not been used for longest
        own.start(ask(Grammar("regex", "a")))
        assert own.compiled == 4
        own.start(ask(Grammar("regex", "c")))
        assert own.compiled == 5
        own.start(ask(Grammar("regex", "e" * 101)))
        own.start(ask(Grammar("regex", "c")))
        assert own.compiled == 7, "a long one has pushed the others out"
    finally:
        own.close()


async def outcome(work: GrammarWork, request: GenerationRequest) -> GrammarState | RyzansteinError:
    found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    work.compile(request, lambda asked, result: found.set_result((asked, result)))
    asked, result = await asyncio.wait_for(found, 30)
    assert asked is request
    assert isinstance(result, GrammarState | RyzansteinError)
    return result


async def test_the_event_loop_hears_of_either_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    work = GrammarWork()
    work.load(CARD, b"")
    try:
        assert isinstance(await outcome(work, ask(Grammar("regex", "a"))), GrammarState)
        assert isinstance(await outcome(work, ask(Grammar("regex", "("))), InvalidGrammar)

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(GrammarCompiler, "start", fail)
        assert isinstance(await outcome(work, ask(Grammar("regex", "b"))), InternalError)
    finally:
        work.close()


async def test_without_a_usable_tokenizer_every_grammar_is_refused() -> None:
    files = tiny_files() | {"tokenizer.json": b'{"model": {"type": "Strange"}}'}
    work = GrammarWork()
    work.load(ModelCard("m", 100, 258, [1], "t", 0), encode(TokenizerBundle(files)))
    try:
        error = await outcome(work, ask(Grammar("regex", "a")))
        assert isinstance(error, InvalidGrammar)
        assert "tokenizer cannot be used" in error.message
    finally:
        work.close()


async def test_one_tenants_grammars_wait_for_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    work = GrammarWork()
    work.load(CARD, b"")
    may_go, order = threading.Event(), []

    def start(_: GrammarCompiler, request: GenerationRequest) -> InvalidGrammar:
        may_go.wait(30)
        order.append(request.tenant)
        return InvalidGrammar("no")

    monkeypatch.setattr(GrammarCompiler, "start", start)
    tenants = ["many"] * 6 + ["one", "two"]
    try:
        asked = [
            outcome(work, msgspec.structs.replace(ask(Grammar("regex", "a")), tenant=tenant)) for tenant in tenants
        ]
        waiting = [asyncio.create_task(one) for one in asked]
        await asyncio.sleep(0)  # all are handed in
        may_go.set()
        await asyncio.gather(*waiting)
    finally:
        may_go.set()
        work.close()
    assert sorted(order) == sorted(tenants)
    assert order.index("one") <= 3
    assert order.index("two") <= 4
