"""Logs of real processes at level debug: what stands in every line, what stands in none, and changing the level."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
import websockets

from services.cli.supervision.nats_server import LocalNats
from services.gateway.api.grpc.generated import inference_pb2 as pb
from tests.integration.gateway.fake_ring import until
from tests.integration.rollout.cluster_fixture import House
from tests.otlp import Collector
from tests.processes import nats_variables

pytestmark = pytest.mark.asyncio(loop_scope="package")

MARK = "mellifluous93"  # stands in every prompt here, and must stand nowhere else
FUNCTION = {
    "type": "function",
    "function": {
        "name": "look",
        "description": f"Looks at {MARK}.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "enum": [MARK]}}},
    },
}
WORD = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"type": "string", "enum": [MARK]}}}


def lines(house: House, pattern: str = "*.log") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in house.logs(pattern).splitlines() if line.startswith("{")]
    assert found
    return found


def events(house: House, identity: str) -> dict[str, dict[str, Any]]:
    """The lines about a request, by their event."""
    return {line["event"]: line for line in lines(house) if line.get("request_id") == identity}


async def settled(condition: Callable[[], bool]) -> None:
    await until(condition)


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": MARK, "max_tokens": 2}),
    ("/v1/completions", {"prompt": MARK, "max_tokens": 2, "stream": True, "echo": True}),
    ("/v1/completions", {"prompt": MARK, "temperature": MARK}),
    ("/v1/completions", {"prompt": MARK, MARK: MARK}),
    ("/v1/completions", {"prompt": MARK * 4000}),
    ("/v1/completions", {"prompt": MARK, "max_tokens": 2, "stop": [MARK], "response_format": WORD}),
    ("/v1/completions", {"prompt": MARK, "response_format": {"type": MARK}}),
    ("/v1/completions", {"prompt": MARK, "guided_regex": f"({MARK}"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARK}], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": MARK, "content": MARK}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARK}], "tools": [FUNCTION], "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": MARK}], "tools": [FUNCTION], "tool_choice": MARK},
    ),
    ("/v1/responses", {"input": MARK, "max_output_tokens": 16}),
    ("/v1/responses", {"input": MARK, "stream": True, "max_output_tokens": 16, "instructions": MARK}),
    ("/v1/embeddings", {"input": MARK}),
    ("/v1/embeddings", {"input": [MARK, 5]}),
]


@pytest.mark.slow
async def test_no_prompt_is_in_any_log(house: House, received: Collector) -> None:
    """Whatever becomes of it, whichever way it came."""
    url = house.url("gateway-0")
    statuses = set()
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        for number, (path, body) in enumerate(BODIES):
            headers = {"x-request-id": f"prompt-{number}"}
            answer = await http.post(path, json={"model": "stub"} | body, headers=headers)
            statuses.add(answer.status_code)
        broken = await http.post("/v1/completions", content=b'{"prompt": "' + MARK.encode())
        assert broken.status_code == 400
        await http.post("/tokenize", json={"model": "stub", "prompt": MARK})
        good = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "stub", "prompt": MARK, "max_tokens": 2},
        }
        for content in (json.dumps(good), json.dumps(good)[:-9]):
            uploaded = await http.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content.encode())}
            )
            wanted = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = (await http.post("/v1/batches", json=wanted)).json()["id"]
            while (await http.get(f"/v1/batches/{batch}")).json()["status"] not in ("completed", "failed"):
                pass
        lost = asyncio.create_task(
            http.post("/v1/completions", json={"model": "stub", "prompt": MARK, "max_tokens": 300})
        )
        await settled(lambda: house.group("executor-0").load.running > 0)
        os.kill(house.group("executor-0").ranks[0].pid, signal.SIGKILL)
        assert (await lost).status_code == 200
    assert statuses == {200, 400}
    async with websockets.connect(f"ws{url.removeprefix('http')}/v1/stream") as socket:
        for path, body in BODIES:
            endpoint = path.removeprefix("/v1/").replace("/", ".")
            request = {"model": "stub"} | body | {"stream": True}
            await socket.send(json.dumps({"type": "generate", "id": "a", "endpoint": endpoint, "request": request}))
            while json.loads(await socket.recv())["type"] not in ("done", "error"):
                pass
        await socket.send(json.dumps({"type": MARK}))
        assert json.loads(await socket.recv())["type"] == "error"
    async with grpc.aio.insecure_channel(house.processes["gateway-0"].beats[-1].grpc_address) as channel:
        generate = channel.unary_stream(
            "/ryzanstein.v1.InferenceService/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=bytes,
        )
        given = pb.GenerateRequest(model="stub", text=MARK, sampling=pb.SamplingParameters(max_tokens=2))
        assert [answer async for answer in generate(given)]
        given.sampling.temperature = -5
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(given).read()
    written = house.logs("*.log")
    assert "prompt-0" in written
    assert '"logger": "uvicorn.error"' in written, "what is shown at level debug alone"
    assert MARK not in written
    assert MARK not in received.shown(), "nor in what is traced"


async def test_a_requests_lines_say_whose_they_are(house: House) -> None:
    identity = "whose-lines"
    async with httpx.AsyncClient(base_url=house.url("gateway-0"), trust_env=False, timeout=60) as http:
        body = {"model": "stub", "prompt": "x", "max_tokens": 3}
        answer = await http.post("/v1/completions", json=body, headers={"x-request-id": identity})
    generation = f"{answer.json()['id'].removeprefix('cmpl-')}"
    await settled(lambda: set(events(house, identity)) >= {"request", "dispatched", "accepted", "finished"})
    found = events(house, identity)
    assert found["request"]["generation_id"] == generation
    assert found["request"]["service"] == "gateway"
    epoch = house.group("executor-0").epoch
    for name in ("dispatched", "accepted", "finished"):
        line = found[name]
        assert (line["generation_id"], line["attempt"]) == (f"{generation}-0", 0)
        assert (line["group"], line["epoch"]) == ("group-0", epoch)
        assert {"trace_id", "span_id"} <= set(line)
    assert (found["finished"]["service"], found["finished"]["rank"]) == ("executor", 0)
    for line in lines(house, "executor-0.log"):
        assert line["group"] == "group-0"
    ended = [line for line in lines(house) if line["event"] == "ring_lost"]
    assert all({"epoch", "group", "reason"} <= set(line) for line in ended)


async def test_lines_of_a_batch_say_which(house: House) -> None:
    """They were run by the test of prompts, or are here."""
    async with httpx.AsyncClient(base_url=house.url("gateway-0"), trust_env=False, timeout=60) as http:
        line = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "stub", "prompt": "x", "max_tokens": 1},
        }
        file = {"file": ("in.jsonl", json.dumps(line).encode())}
        uploaded = await http.post("/v1/files", data={"purpose": "batch"}, files=file)
        wanted = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=wanted)).json()["id"]
    ended = lambda: [line for line in lines(house, "executor-0.log") if batch in line.get("request_id", "")]  # noqa: E731
    await settled(lambda: {line["event"] for line in ended()} >= {"accepted", "finished"})


# --- ryzanstein log-level ------------------------------------------------------------------------


async def command(nats: LocalNats, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "log-level", *arguments, "--nats-url", nats.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **nats_variables(nats.settings()), "NO_COLOR": "1", "COLUMNS": "120"},
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


def levels(output: str) -> dict[str, str]:
    rows = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()[1:]]
    return {row[1]: row[2] for row in rows}


@pytest.mark.slow
async def test_the_level_of_a_group_is_changed_and_shown_while_it_runs(house: House, nats: LocalNats) -> None:
    everything = dict.fromkeys(("executor-0", "gateway-0", "monitor-0", "scheduler-0"), "debug")
    code, shown = await command(nats)
    assert (code, levels(shown)) == (0, everything), shown
    code, shown = await command(nats, "group-0", "error", "--for", "10m")
    assert (code, levels(shown)) == (0, {"executor-0": "error"}), shown
    assert re.search(r"debug in (10m 00s|9m 5\ds)", shown)
    before = len(lines(house, "executor-0.log"))
    async with httpx.AsyncClient(base_url=house.url("gateway-0"), trust_env=False, timeout=60) as http:
        body = {"model": "stub", "prompt": "x", "max_tokens": 3}
        await http.post("/v1/completions", json=body, headers={"x-request-id": "unheard"})
    await settled(lambda: "dispatched" in events(house, "unheard"))
    assert "accepted" not in events(house, "unheard"), "the leader, a process of its own, has it, too"
    assert len(lines(house, "executor-0.log")) == before
    lost = house.group("executor-0")
    os.kill(lost.ranks[1].pid, signal.SIGKILL)
    await house.processes["executor-0"].wait_for(
        lambda beat: beat.group is not None and beat.group.state == "ready" and beat.group.epoch > lost.epoch
    )
    assert not [line for line in lines(house, "executor-0.log") if line.get("epoch", 0) > lost.epoch], (
        "a ring that starts later has it, too"
    )
    code, shown = await command(nats, "executor", "usual")
    assert (code, levels(shown)) == (0, {"executor-0": "debug"}), shown
    assert events(house, "unheard")["request"]["service"] == "gateway"
    async with httpx.AsyncClient(base_url=house.url("gateway-0"), trust_env=False, timeout=60) as http:
        await http.post("/v1/completions", json=body, headers={"x-request-id": "heard"})
    await settled(lambda: "accepted" in events(house, "heard"))


@pytest.mark.slow
async def test_it_comes_back_by_itself(house: House, nats: LocalNats) -> None:
    code, shown = await command(nats, "scheduler-0", "error", "--for", "1s")
    assert (code, levels(shown)) == (0, {"scheduler-0": "error"}), shown
    while levels((await command(nats, "scheduler-0"))[1]) != {"scheduler-0": "debug"}:
        pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nobody",), "error: No service, instance or group is called nobody; the instances are: executor-0,"),
        (("all", "loud"), "error: There is no level 'loud'; it is one of debug, info, warning, error, usual."),
        (("all", "--for", "10m"), "error: --for needs a level"),
        (("all", "debug", "--for", "soon"), "error: --for cannot be 'soon'; say 30s, 10m, 2h or 1d."),
    ],
)
async def test_what_is_wrong_is_one_sentence(
    house: House, nats: LocalNats, arguments: tuple[str, ...], said: str
) -> None:
    code, shown = await command(nats, *arguments)
    assert code == 1
    assert said in shown
    assert len(shown.splitlines()) == 1
