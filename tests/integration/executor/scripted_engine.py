"""An engine in vLLM's place, which does what a test says: `scripted_engine.py SCRIPT -m ryzanstein_vllm.worker FD`.

It speaks the worker's own messages. The token at position p of an answer with the seed s is `token_at(s, p)`, whatever
the batch and the attempt. SCRIPT is a file of JSON:

    refuses    a sentence, told instead of being ready
    exits      a line of output, before it ends with code 3
    once       what happens to the first engine of a test at its 12th token: `die`, `stop`, `mute`, or `fail`, which is
               told, and does not end by itself
    wide       tokens in a delta
    places, unsupported, adapters    as `EngineFacts`
"""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

FATAL_TOKENS = 12
WRONG = 99  # a prompt that begins with it gets a token that no vocabulary has


def token_at(seed: int, position: int, adapter: str = "") -> int:
    return (seed * 31 + position * 7 + int(adapter[:4] or "0", 16)) % 200 + 2


class Engine:
    def __init__(self, script: dict[str, Any], directory: Path, writer: asyncio.StreamWriter) -> None:
        from ryzanstein_vllm.worker import Delta, FailedMessage, StepMessage, send

        self._delta, self._failed, self._step, self._send = Delta, FailedMessage, StepMessage, send
        self._script, self._directory, self._writer = script, directory, writer
        self.live: dict[str, Any] = {}
        self._steps = self._tokens = 0

    def abort(self, ids: list[str]) -> None:
        with (self._directory / "aborted").open("a") as file:
            file.writelines(f"{one}\n" for one in ids if self.live.pop(one, None))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            if self.live:
                self._compute()

    def _compute(self) -> None:
        deltas = []
        for request in list(self.live.values()):
            done = len(request.tokens) - request.prompt_tokens
            count = min(self._script.get("wide", 1), request.max_tokens)
            seed, adapter = request.sampling.get("seed", 0), request.adapter
            assert not adapter or (Path(request.adapter_directory) / "adapter_model.safetensors").exists()
            tokens = [token_at(seed, done + at, adapter) for at in range(count)]
            request.tokens += tokens
            request.max_tokens -= count
            self._tokens += count
            if request.tokens[0] == WRONG:
                tokens = [9999]
            finish = "" if request.max_tokens else "length"
            if finish:
                del self.live[request.id]
            deltas.append(self._delta(request.id, tokens, finish, cached_tokens=1))
        self._misbehave()
        self._steps += 1
        self._send(self._writer, self._step(self._steps, deltas, len(self.live)))

    def _misbehave(self) -> None:
        happened = self._directory / "happened"
        what = self._script.get("once", "")
        if not what or self._tokens < FATAL_TOKENS or (happened.exists() and what != "mute"):
            return
        happened.touch()
        if what == "mute":  # for good: it answers nothing more, and its loop goes on
            self.live.clear()
        if what == "fail":
            self._send(self._writer, self._failed("Scripted to fail"))
        if number := {"die": signal.SIGKILL, "stop": signal.SIGSTOP}.get(what):
            os.kill(os.getpid(), number)


def main(script: Path, fd: int) -> None:
    told = msgspec.json.decode(script.read_bytes(), type=dict[str, Any])
    if line := told.get("exits"):
        sys.stderr.write(f"{line}\n")
        sys.exit(3)
    asyncio.run(serve(told, script.parent, fd))


async def serve(told: dict[str, Any], directory: Path, fd: int) -> None:
    from ryzanstein_vllm.worker import Abort, FailedMessage, Generate, ReadyMessage, Start, receive, send

    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    start = msgspec.msgpack.decode(await receive(reader), type=Start)
    (directory / "arguments").write_text("\n".join(start.arguments))
    if sentence := told.get("refuses"):
        send(writer, FailedMessage(sentence))
        await writer.drain()
        return
    facts = {"adapters": told.get("adapters", 0), "unsupported": told.get("unsupported", [])}
    send(writer, ReadyMessage("Scripted 1.0", 258, 512, told.get("places", 8), 4096, exact=True, **facts))
    engine = Engine(told, directory, writer)
    running = asyncio.create_task(engine.run())
    running.add_done_callback(lambda done: writer.close())  # a fault of the script is the engine's end
    commands = msgspec.msgpack.Decoder(Generate | Abort)
    try:
        while True:
            command = commands.decode(await receive(reader))
            if isinstance(command, Abort):
                engine.abort(command.ids)
            else:
                engine.live[command.id] = command
    except EOFError:
        running.cancel()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[4]))
