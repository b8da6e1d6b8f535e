"""Chat templates, rendered in a process of their own: `python -m services.gateway.tokenizer.template_process`.

A template is a program that comes with a model's files. jinja2's sandbox keeps it from reaching anything but the
values it is given; it does not keep it from asking for gigabytes or from never ending. There that costs this process
its life, and whoever asked hears which limit was passed:

    render ──messages──▶ process: limits on CPU time, memory and the size of the text
           ◀──prompt───  (it ends: the template is to blame, and the next conversation gets a new process)

Small conversations that wait together go together, for a read and a write instead of one each; should the process end
with several of them, each is tried again alone, so that none answers for another.

There is one process per tokenizer, so that a template of one model is in the way of no other.
"""

import asyncio
import math
import pickle
import resource
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from services.gateway.core.errors import InvalidParameter
from services.gateway.core.tenant_pool import Bound, TenantPool
from services.gateway.tokenizer.templates import TemplateInput, TemplateOptions, Templates, Traits, Turns
from services.gateway.tokenizer.turns import turns_of
from shared import limits
from shared.child_environment import environment_without_settings
from shared.errors import InternalError
from shared.tasks import RoundRobin

if TYPE_CHECKING:
    from services.gateway.tokenizer.chat_template import ChatTemplate

ANSWER_WITHIN = 60.0  # seconds of waiting for a process that gets no processor
GOODBYE = 1.0  # seconds for a process that has closed its end to be gone
_LARGE = 1 << 20  # bytes from which what a conversation needed is given back at once
_HEAD = 4
_TOGETHER = 16  # conversations that go together, at most: the first of them waits for the last
# Of such conversations: what a pipe holds, so that neither side waits for the other.
_TOGETHER_BYTES = 32 << 10
_NO_MEMORY = limits.TEMPLATE_MEMORY.cited()
_NO_TIME = limits.TEMPLATE_SECONDS.cited()
_TOO_LONG = limits.TEMPLATE_TEXT.cited()
_NO_TEXT = "The chat template of the model renders these messages as text that is not UTF-8; send others."
_ENDED = "what a process may do that renders it"


class _Job(msgspec.Struct, frozen=True):
    """A conversation to be rendered; without messages: the templates, to be compiled and probed."""

    templates: Templates | None = None
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    options: TemplateOptions = TemplateOptions()
    # Which messages are trained: the texts for that are wanted, and no prompt.
    trained: list[int] | None = None


class _Reply(msgspec.Struct, frozen=True):
    text: str = ""
    turns: list[Turns] = []
    traits: Traits | None = None
    problem: str = ""  # why there is none: the sentence for the client
    param: str | None = None
    reason: str = ""
    limit: str = ""  # the limit that was passed


def _packed(job: _Job) -> bytes:
    """By pickle, since what clients send is not always MessagePack; as plain values, which are read faster."""
    options = job.options
    plain = (options.add_generation_prompt, options.continue_final, options.variables)
    return pickle.dumps((job.templates, job.messages, job.tools, plain, job.trained))


def _unpacked(data: bytes) -> _Job:
    templates, messages, tools, options, trained = pickle.loads(data)  # noqa: S301  # what the gateway wrote
    return _Job(templates, messages, tools, TemplateOptions(*options), trained)


_encode = msgspec.msgpack.Encoder().encode
_replies = msgspec.msgpack.Decoder(_Reply)


class _Asked(NamedTuple):
    tenant: str
    job: bytes
    reply: "asyncio.Future[_Reply]"


class TemplateProcess:
    """The templates of one tokenizer. Conversations are rendered one after another, each tenant's in turn."""

    def __init__(self, templates: Templates) -> None:
        self._templates = _packed(_Job(templates))
        self._process: Process | None = None
        self._turns: RoundRobin[_Asked] = RoundRobin()
        self._waiting = TenantPool(
            Bound(limits.TEMPLATES_WAITING, limits.TEMPLATES_WAITING.value), "conversations to render"
        )
        self._worker: asyncio.Task[None] | None = None
        self.traits = Traits()
        self.refused = ""  # the limit that the template passed with small conversations: it is not used again

    async def probe(self) -> None:
        """Finds out what the templates can do. Raises `InternalError` where they are none."""
        reply = await self._ask(b"", "")
        if reply.problem:
            raise InternalError(f"The tokenizer files of the model cannot be used: {reply.problem}.")
        self.refused, self.traits = reply.limit, reply.traits or Traits()
        if self.refused:
            await self.close()

    async def render(self, conversation: TemplateInput, tenant: str = "") -> str:
        """The prompt, in the turn of `tenant`. Raises `InvalidParameter`, which names the limit that was passed, if one
        was; `QueueFull`."""
        return (await self._rendered(conversation, tenant)).text

    async def turns(self, conversation: TemplateInput, trained: Sequence[int], tenant: str = "") -> list[Turns]:
        """See `turns_of`; all its renderings together are one under the limits. Raises as `render`."""
        return (await self._rendered(conversation, tenant, list(trained))).turns

    async def _rendered(self, conversation: TemplateInput, tenant: str, trained: list[int] | None = None) -> _Reply:
        if self.refused:
            raise _passed(self.refused, "small conversations, and is not used; POST /v1/completions instead")
        messages, tools, options = conversation
        job = _Job(None, [*map(dict, messages)], None if tools is None else [*map(dict, tools)], options, trained)
        reply = await self._ask(_packed(job), tenant)
        if reply.limit:
            raise _passed(reply.limit, "these messages; send fewer or shorter ones, or another model")
        if reply.problem:
            raise InvalidParameter(reply.problem, param=reply.param, reason=reply.reason)
        return reply

    def _ask(self, job: bytes, tenant: str) -> "asyncio.Future[_Reply]":
        self._waiting.take(tenant, len(job))
        future: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._turns.add(tenant, _Asked(tenant, job, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return future

    async def _work(self) -> None:
        while taken := self._next():
            asked = [one for one in taken if not one.reply.done()]  # of the others the clients have gone
            try:
                replies = await self._exchange([one.job for one in asked]) if asked else []
                if not replies:  # one of them has ended the process
                    replies = [await self._alone(one) for one in asked]
                for one, reply in zip(asked, replies, strict=True):
                    if not one.reply.done():
                        one.reply.set_result(reply)
            except Exception as error:  # no process can be started
                for one in asked:
                    if not one.reply.done():
                        one.reply.set_exception(InternalError(f"No chat template can be rendered: {error}."))
            finally:
                for one in taken:
                    self._waiting.give_back(one.tenant, len(one.job))

    def _next(self) -> list[_Asked]:
        """The one whose turn it is, and those behind it that go with it."""
        taken, size = list[_Asked](), 0
        while len(taken) < _TOGETHER and (one := self._turns.peek()) is not None:
            size += len(one.job)
            if taken and size > _TOGETHER_BYTES:
                break
            self._turns.next()
            taken.append(one)
        return taken

    async def _alone(self, one: _Asked) -> _Reply:
        return _Reply() if one.reply.done() else (await self._exchange([one.job]))[0]

    async def _exchange(self, jobs: list[bytes]) -> list[_Reply]:
        """A reply to each; none where the process has ended with several."""
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.gateway.tokenizer.template_process",
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                limit=_LARGE,
                env=environment_without_settings(),
            )
            probed = await self._answers(process, [self._templates])
            if jobs == [b""] or probed[0].limit or probed[0].problem:
                return probed * len(jobs)
        return await self._answers(process, jobs)

    async def _answers(self, process: Process, jobs: list[bytes]) -> list[_Reply]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            heads = (len(job).to_bytes(_HEAD) for job in jobs)
            process.stdin.write(
                len(jobs).to_bytes(_HEAD) + b"".join(chain.from_iterable(zip(heads, jobs, strict=True)))
            )
            replies = []
            async with asyncio.timeout(ANSWER_WITHIN):
                await process.stdin.drain()
                for _ in jobs:
                    size = int.from_bytes(await process.stdout.readexactly(_HEAD))
                    if size > limits.TEMPLATE_TEXT.value + _LARGE:
                        raise OSError("it does not keep to the limit")
                    replies.append(_replies.decode(await process.stdout.readexactly(size)))
                return replies
        except (asyncio.IncompleteReadError, OSError, TimeoutError, msgspec.MsgspecError):
            pass
        with suppress(TimeoutError):  # killed while it ends, asyncio could not tell how it has ended
            async with asyncio.timeout(GOODBYE):
                await process.wait()
        await self.close()
        ended = await process.wait()
        if len(jobs) > 1:
            return []
        return [_Reply(limit=_NO_TIME if ended in (-signal.SIGXCPU, -signal.SIGKILL) else _ENDED)]

    async def close(self) -> None:
        """Ends the process. Another conversation would start a new one."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()  # a template in native code answers no other signal where one is handled
            await process.communicate()


def _passed(limit: str, with_what: str) -> InvalidParameter:
    return InvalidParameter(
        f"The chat template of the model exceeded a limit with {with_what} ({limit}).",
        param="messages",
        reason="chat_template_limit",
    )


# --- in that process -----------------------------------------------------------------------------


def main() -> None:
    """Answers jobs of standard input, several at a time, with replies on standard output, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the gateway
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, limits.TEMPLATE_MEMORY.value)
    renderer, jobs, replies = _Renderer(), sys.stdin.buffer, sys.stdout.buffer
    until = 0
    while count := jobs.read(_HEAD):
        for _ in range(int.from_bytes(count)):
            head = jobs.read(_HEAD)
            end = math.ceil(time.process_time()) + limits.TEMPLATE_SECONDS.value
            if end != until:
                _limit(resource.RLIMIT_CPU, end)
                until = end
            reply = _encode(renderer.reply(jobs, int.from_bytes(head)))
            replies.write(len(reply).to_bytes(_HEAD) + reply)
        replies.flush()


def _limit(what: int, soft: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


class _Renderer:
    def __init__(self) -> None:
        self._templates: tuple[ChatTemplate, ChatTemplate] | None = None

    def reply(self, jobs: BinaryIO, size: int) -> _Reply:
        try:
            return self._reply(_unpacked(jobs.read(size)))
        except MemoryError:
            return _Reply(limit=_NO_MEMORY)
        except InvalidParameter as error:
            return _Reply(problem=error.message, param=error.param, reason=error.reason)
        except UnicodeEncodeError:
            return _Reply(problem=_NO_TEXT, param="messages", reason="invalid_messages")

    def _reply(self, job: _Job) -> _Reply:
        if job.templates is not None:
            return self._compile(job.templates)
        assert self._templates is not None, "the templates come first"
        template = self._templates[job.tools is not None]
        if job.trained is not None:
            turns = turns_of(template, TemplateInput(job.messages, job.tools, job.options), job.trained)
            size = sum(len(turn.text.encode()) for turn in turns)
            return _Reply(turns=turns) if size <= limits.TEMPLATE_TEXT.value else _Reply(limit=_TOO_LONG)
        text = template.render(job.messages, job.tools, job.options)
        return _Reply(text) if len(text.encode()) <= limits.TEMPLATE_TEXT.value else _Reply(limit=_TOO_LONG)

    def _compile(self, templates: Templates) -> _Reply:
        # jinja2, which the gateway itself does without
        from services.gateway.tokenizer.chat_template import compiled, traits_of

        try:
            self._templates = compiled(templates)
        except ValueError as error:
            return _Reply(problem=str(error))
        return _Reply(traits=traits_of(self._templates[1]))


if __name__ == "__main__":
    main()
