"""Chat templates are rendered in a process with limits: one that passes them costs nobody else anything."""

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.core.errors import InvalidParameter
from services.gateway.tokenizer.template_process import (
    _NO_MEMORY,
    _TOO_LONG,
    TemplateProcess,
    _Job,
    _packed,
    _Renderer,
    _Reply,
)
from services.gateway.tokenizer.templates import TemplateInput, TemplateOptions, Templates
from shared import limits
from shared.errors import InternalError, QueueFull
from tests.unit.gateway.tokenizer.tiny_tokenizer import TEMPLATE

CHAT = [{"role": "user", "content": "Hi"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
NESTED = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
)


MEMORY, TIME = (limits.TEMPLATE_MEMORY.cited(),), (limits.TEMPLATE_SECONDS.cited(),)


def templates(source: str) -> Templates:
    return Templates(source, source, {"eos_token": "<|end|>"})


IMPATIENT = """
import msgspec
from services.gateway.tokenizer import template_process
from shared import limits
limits.TEMPLATE_SECONDS = msgspec.structs.replace(limits.TEMPLATE_SECONDS, value=1)
template_process.main()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes give a template half the time, so that tests wait half as long."""
    start = asyncio.create_subprocess_exec

    async def started(python: str, *_: str, **options: Any) -> asyncio.subprocess.Process:
        return await start(python, "-c", IMPATIENT, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)


@pytest.fixture
async def made() -> AsyncIterator[list[TemplateProcess]]:
    processes: list[TemplateProcess] = []
    yield processes
    for process in processes:
        await process.close()


async def probed(source: str, made: list[TemplateProcess]) -> TemplateProcess:
    process = TemplateProcess(templates(source))
    made.append(process)
    await process.probe()
    return process


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("{{ 'a' * 10**10 }}", MEMORY),
        ("{{ 'a' | center(10000000000) }}", MEMORY),
        ("{{ 'a'.ljust(10000000000) }}", MEMORY),
        ("{{ '%10000000000d' % 1 }}", MEMORY),
        ("{{ (['a' * 100000] * 100000) | join }}", MEMORY + TIME),  # whichever comes first on this processor
        (DOUBLING, MEMORY),
        (LOOPS, TIME),
        pytest.param(NESTED, TIME, marks=pytest.mark.slow),
    ],
    ids=["product", "center", "ljust", "width", "join", "doubling", "loops", "comparison"],
)
async def test_a_template_that_passes_a_limit_is_refused(
    source: str, limit: tuple[str, ...], made: list[TemplateProcess]
) -> None:
    """Found out with the gateway's own small conversations: the template is to blame, and is not tried again."""
    process = await probed(source, made)
    assert process.refused in limit
    for _ in range(2):
        with pytest.raises(InvalidParameter, match="small conversations") as caught:
            await process.render(TemplateInput(CHAT))
        assert caught.value.reason == "chat_template_limit"


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def test_it_has_none_of_the_gateways_settings(
    made: list[TemplateProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RYZANSTEIN_NATS_PASSWORD", "secret")
    process = await probed("{{ messages[0].content }}", made)
    assert b"RYZANSTEIN_" not in environment_of(process._process.pid)


async def test_a_prompt_has_a_size_at_most(made: list[TemplateProcess]) -> None:
    # Not a constant, which would be computed as the template is compiled: two seconds of a slow processor.
    process = await probed("{{ messages[0].content * 35000000 if messages[0].content == 'Hi' }}", made)
    with pytest.raises(InvalidParameter, match=r"with these messages.*limit template_text"):
        await process.render(TemplateInput(CHAT))
    assert await process.render(TemplateInput([{"role": "user", "content": "Hello"}])) == ""


async def test_recursion_is_the_templates_refusal(made: list[TemplateProcess]) -> None:
    process = await probed("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", made)
    with pytest.raises(InvalidParameter, match="recursion"):
        await process.render(TemplateInput(CHAT))


@pytest.mark.slow
async def test_the_next_conversation_gets_a_new_process(made: list[TemplateProcess]) -> None:
    """What one conversation makes a template do is no reason to refuse others."""
    source = "{% if messages[0].content == 'bomb' %}" + LOOPS + "{% endif %}" + TEMPLATE
    process = await probed(source, made)
    bomb = asyncio.create_task(process.render(TemplateInput([{"role": "user", "content": "bomb"}])))
    chat = asyncio.create_task(process.render(TemplateInput(CHAT)))
    with pytest.raises(InvalidParameter, match=r"with these messages.*limit template_seconds: 2 seconds, fixed"):
        await bomb
    assert "Hi<|end|>" in await chat


@pytest.mark.slow
async def test_each_of_many_that_wait_gets_its_own_prompt(made: list[TemplateProcess]) -> None:
    """Some are large, and go alone; one ends the process for those that go with it."""
    source = "{% if messages[0].content == 'bomb' %}" + LOOPS + "{% endif %}" + TEMPLATE
    process = await probed(source, made)
    texts = [f"{number} " + "x" * (50_000 if number % 10 == 7 else 10) for number in range(40)]
    texts[20] = "bomb"
    chats = ([{"role": "user", "content": text}] for text in texts)
    found = await asyncio.gather(*(process.render(TemplateInput(chat)) for chat in chats), return_exceptions=True)
    assert isinstance(found.pop(20), InvalidParameter)
    del texts[20]
    assert all(f"{text}<|end|>" in str(prompt) for text, prompt in zip(texts, found, strict=True))


async def test_a_process_that_is_killed_is_replaced(made: list[TemplateProcess]) -> None:
    process = await probed(TEMPLATE, made)
    os.kill(process._process.pid, signal.SIGKILL)
    await process._process.wait()
    assert "Hi<|end|>" in await process.render(TemplateInput(CHAT))


async def test_one_whose_client_has_gone_is_not_mistaken_for_the_next(made: list[TemplateProcess]) -> None:
    process = await probed(TEMPLATE, made)
    first = asyncio.create_task(process.render(TemplateInput(CHAT)))
    await asyncio.sleep(0)
    first.cancel()
    assert "Hello" in await process.render(TemplateInput([{"role": "user", "content": "Hello"}]))


async def test_traits_variables_and_values_come_through(made: list[TemplateProcess]) -> None:
    process = await probed(
        "{{ messages[0].content }}|{{ add_generation_prompt }}|{{ tone }}|{{ tools | tojson }}", made
    )
    assert process.traits.variables == {"tone"}
    options = TemplateOptions(variables={"tone": [10**30, None, True]})
    text = await process.render(TemplateInput(CHAT, [{"a": float("inf")}], options))
    assert text == f"Hi|True|[{10**30}, None, True]|" + '[{"a": Infinity}]'


async def test_refusals_of_the_template_are_told_as_they_are(made: list[TemplateProcess]) -> None:
    process = await probed("{{ raise_exception('Roles must alternate' * 1000) }}", made)
    with pytest.raises(InvalidParameter, match="Roles must alternate") as caught:
        await process.render(TemplateInput(CHAT))
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 1200
    broken = TemplateProcess(templates("{% if %}"))
    made.append(broken)
    with pytest.raises(InternalError, match="cannot be used"):
        await broken.probe()


@pytest.mark.slow
async def test_what_training_learns_of_a_conversation_is_one_rendering_under_the_limits(
    made: list[TemplateProcess],
) -> None:
    process = await probed(TEMPLATE, made)
    chat = [*CHAT, {"role": "assistant", "content": "Hello"}]
    (turns,) = await process.turns(TemplateInput(chat), [1])
    assert [turns.text[begin:end] for begin, end in turns.spans] == ["Hello<|end|>\n"]
    with pytest.raises(InvalidParameter, match=r"with these messages.*limit template_seconds"):
        await process.turns(TemplateInput(chat * 4000), [*range(1, 8000, 2)])
    assert "Hi" in await process.render(TemplateInput(CHAT))


async def test_what_waits_is_bounded(made: list[TemplateProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TEMPLATES_WAITING", msgspec.structs.replace(limits.TEMPLATES_WAITING, value=1000))
    process = await probed(TEMPLATE, made)
    waiting = asyncio.create_task(process.render(TemplateInput([{"role": "user", "content": "x" * 2000}])))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="limit templates_waiting"):
        await process.render(TemplateInput(CHAT))
    assert "xxx" in await waiting
    assert "Hi" in await process.render(TemplateInput(CHAT))


async def test_no_tenant_keeps_others_from_a_template(
    made: list[TemplateProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three large conversations of one wait, and it may have no fourth; another's is rendered after its first."""
    monkeypatch.setattr(limits, "TEMPLATES_WAITING", msgspec.structs.replace(limits.TEMPLATES_WAITING, value=1 << 20))
    process, order = await probed(TEMPLATE, made), list[str]()

    async def render(tenant: str, content: str) -> None:
        await process.render(TemplateInput([{"role": "user", "content": content}]), tenant)
        order.append(tenant)

    waiting = [asyncio.create_task(render("a", "x" * 80_000)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match=r"limit templates_waiting: 1,048,576 .*a quarter for a tenant"):
        await render("a", "x" * 80_000)
    await asyncio.gather(render("b", "Hi"), *waiting)
    assert order in (["a", "a", "b", "a"], ["a", "b", "a", "a"])


class Jobs:
    """What the gateway writes, as the process reads it."""

    def __init__(self, renderer: _Renderer) -> None:
        self._renderer = renderer

    def reply(self, job: _Job) -> _Reply:
        data = _packed(job)
        return self._renderer.reply(io.BytesIO(data), len(data))

    def chat(self, content: str, tools: list[dict[str, Any]] | None = None) -> _Reply:
        return self.reply(_Job(None, [{"role": "user", "content": content}], tools))


def test_each_job_has_one_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(_Renderer())
    assert "Expected an expression" in jobs.reply(_Job(templates("{% if %}"))).problem
    assert jobs.reply(_Job(templates(TEMPLATE))).traits is not None
    assert "Hi" in jobs.chat("Hi").text
    assert "Hi" in jobs.chat("Hi", []).text
    assert jobs.chat("\ud800").reason == "invalid_messages"
    jobs.reply(_Job(templates("{{ raise_exception('no turns') }}")))
    refused = jobs.chat("Hi")
    assert "no turns" in refused.problem
    assert refused.param == "messages"
    jobs.reply(_Job(templates("{{ 'a' * 9 }}")))
    monkeypatch.setattr(limits, "TEMPLATE_TEXT", msgspec.structs.replace(limits.TEMPLATE_TEXT, value=8))
    assert jobs.chat("Hi").limit == _TOO_LONG
    answered = _Job(messages=[*CHAT, {"role": "assistant", "content": "Hello"}], trained=[1])
    jobs.reply(_Job(templates(TEMPLATE)))
    assert jobs.reply(answered).limit == _TOO_LONG
    monkeypatch.undo()
    (turns,) = jobs.reply(answered).turns
    assert "Hello" in turns.text


def test_a_job_that_memory_does_not_hold_names_that_limit() -> None:
    class Full(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise MemoryError

    assert _Renderer().reply(Full(), 5).limit == _NO_MEMORY
