"""The programs of docs/clients do what they say, in every language that is at hand."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.config import CommonSettings
from shared.messages import GenerationRequest
from shared.nats.bus import Bus
from tests.integration.clients import programs
from tests.integration.clients.cutting import cutting
from tests.integration.clients.programs import EXAMPLES, LANGUAGES, Command, run, running
from tests.integration.gateway.auth.test_limits import make
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import FakeRing, say, saying, until
from tests.integration.gateway.lifecycle.test_gateway_lost import gateway_process
from tests.integration.gateway.resuming import Paced, text_of

TEXT = "Once upon a time, a connection was lost, and nobody who listened noticed."
PERSON = '{"name": "Anna", "age": 31}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def said(language: str, shown: str) -> str:
    """The text of an answer; curl's examples show events."""
    if language != "curl":
        return shown.removesuffix("\n")
    return text_of([(data, "") for data in re.findall(r"^data: (.*)\n", shown, re.MULTILINE)])


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.slow
async def test_a_key_is_sent(language: str, gateway: RunningGateway, ring: FakeRing, bus: Bus) -> None:
    """Both programs of a language, once the house asks for keys; one that is not good is told so at once."""
    chat, resume = [await asyncio.to_thread(LANGUAGES[language], name) for name in ("chat", "resume")]
    ring.behave = saying(TEXT)
    key = await make(bus)
    async with gateway.http() as http:

        async def refused() -> bool:
            return (await http.get("/v1/models")).status_code == 401

        await until(refused)
    for command in (chat, resume):
        assert said(language, await run(command, gateway.url, RYZANSTEIN_API_KEY=key.token)) == TEXT
    with pytest.raises(AssertionError, match=r"401|invalid_api_key|API key"):
        await run(resume, gateway.url, RYZANSTEIN_API_KEY="wrong")


@pytest.mark.slow
async def test_a_stream_survives_its_connections_and_its_gateway(
    language: str, bus: Bus, nats_settings: CommonSettings, gateway: RunningGateway, ring: FakeRing, tmp_path: Path
) -> None:
    """Cut at the first gateway, cut at the second, then the first one, which looks after it, is killed."""
    command = await asyncio.to_thread(LANGUAGES[language], "resume")
    ring.behave = paced = Paced(TEXT.encode(), 10)
    async with (
        gateway_process(bus, nats_settings, tmp_path) as doomed,
        cutting(str(doomed.http.base_url)) as first,
        cutting(gateway.url) as second,
        running(command, f"{first.url},{second.url}") as program,
    ):

        async def shown(characters: int) -> None:
            await program.until(lambda text: len(said(language, text)) >= characters)

        await shown(10)
        first.cut()
        paced.allow(25)
        await shown(25)
        second.cut()
        paced.allow(40)
        await shown(40)
        await doomed.kill()
        paced.allow()
        assert said(language, await program.end()) == TEXT
    assert len(ring.requests) == 1


@pytest.mark.parametrize("build", [programs.python, programs.javascript], ids=["python", "javascript"])
async def test_an_answer_of_a_given_form(
    build: Callable[[str], Command], gateway: RunningGateway, ring: FakeRing
) -> None:
    command = await asyncio.to_thread(build, "structured")
    ring.behave = saying(PERSON)
    assert await run(command, gateway.url) == "Anna is 31.\n"
    (request,) = ring.requests
    assert request.grammar is not None


@pytest.mark.parametrize(
    ("build", "name"),
    [(programs.python, "websocket_chat"), (programs.javascript, "websocket")],
    ids=["python", "javascript"],
)
async def test_two_answers_on_a_websocket(
    build: Callable[[str], Command], name: str, gateway: RunningGateway, ring: FakeRing, bus: Bus
) -> None:
    command = await asyncio.to_thread(build, name)
    ring.behave = echo
    key = await make(bus)
    shown = await run(command, gateway.url, RYZANSTEIN_API_KEY=key.token)
    assert shown == "a: A story.\nb: A poem.\n"


async def echo(ring: FakeRing, request: GenerationRequest) -> None:
    await say(ring, request, "A poem." if b"poem" in bytes(request.prompt) else "A story.")


async def test_tools(gateway: RunningGateway, ring: FakeRing) -> None:
    async def behave(ring: FakeRing, request: GenerationRequest) -> None:
        await say(ring, request, "It is sunny." if b"22 degrees" in bytes(request.prompt) else CALL)

    ring.behave = behave
    assert await run(programs.python("tools"), gateway.url) == "get_weather({'city': 'Rome'})\nIt is sunny.\n"


async def test_responses(gateway: RunningGateway, ring: FakeRing) -> None:
    async def behave(ring: FakeRing, request: GenerationRequest) -> None:
        prompt = bytes(request.prompt)
        if b"What is my name?" in prompt:
            await say(ring, request, "Ada." if b"My name is Ada." in prompt else "Who knows.")
        else:
            await say(ring, request, "A story." if b"story" in prompt else "Hello, Ada.")

    ring.behave = behave
    assert await run(programs.python("responses"), gateway.url) == "Hello, Ada.\nAda.\nA story.\n"


def test_every_example_is_in_the_list() -> None:
    """The page names each program, and nothing that is not there."""
    page = (EXAMPLES / "README.md").read_text()
    named = set(re.findall(r"\]\(((?:python|javascript|go|rust|curl)/[^)]+)\)", page))
    sources = {"*.py", "*.sh", "*.rs"} | {"chat.js", "resume.js", "structured.js", "websocket.js", "main.go"}
    there = {
        str(path.relative_to(EXAMPLES))
        for pattern in sources
        for path in EXAMPLES.rglob(pattern)
        if not {"node_modules", "target"} & set(path.parts) and path.name != "lib.rs"
    }
    assert named == there
