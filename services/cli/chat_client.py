"""A conversation with the gateway, streamed to the terminal."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import msgspec

from services.cli.gateway_client import EventReader, http_options
from shared.errors import ConfigurationError, RyzansteinError, Unavailable

Message = dict[str, str]


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    text: str = ""  # of a completion


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str
    code: str | None = None


class _Said(msgspec.Struct, frozen=True):
    """What is read of the gateway's words: of a list of models, of an event, of an error."""

    data: list[_Model] | None = None
    choices: list[_Choice] = []
    error: _ErrorBody | None = None


class KeyNeeded(ConfigurationError):
    """The gateway asks for an API key, or for another one."""


class NoChatTemplate(RyzansteinError):
    """The model goes on with texts and knows no conversations."""


class TemplateRefused(RyzansteinError):
    """The model's chat template does not take these messages, or cannot be rendered at all."""


class GeneratesNoText(RyzansteinError):
    """The model embeds or classifies, and answers nothing."""


_KINDS: dict[str | None, type[RyzansteinError]] = {
    "no_chat_template": NoChatTemplate,
    "invalid_messages": TemplateRefused,
    "chat_template_limit": TemplateRefused,
    "unsupported_task": GeneratesNoText,
}
# How often, and after how many seconds, a gateway that lists no model yet is asked again.
LISTINGS, LISTING_PAUSE = 50, 0.1
# Of a text that is gone on with, where nobody says how many: a base model seldom ends one by itself.
PLAIN_TOKENS = 256
_WAITS = httpx.Timeout(600.0, connect=5.0)


class ChatClient:
    """Speaks to one gateway; keeps the conversation's messages and its session id.

    Raises `ConfigurationError` when `url` is no address of one.
    """

    def __init__(
        self, url: str, *, model: str = "", session: str = "", api_key: str = "", trust: ssl.SSLContext | bool = True
    ) -> None:
        self.url = _checked(url)
        self._client = httpx.Client(**http_options(api_key, trust, _WAITS))
        self._headers = {"x-session-id": session} if session else {}
        self.model = model
        self.messages: list[Message] = []
        # Whether the model has turned out to have no chat template: it goes on with each text alone.
        self.plain = False
        # Is told how many tokens of a long prompt, of how many, have been computed.
        self.on_progress: Callable[[int, int], None] | None = None

    def close(self) -> None:
        self._client.close()

    def choose_model(self) -> str:
        """The model that was named, else the first that the gateway serves."""
        if not self.model:
            try:
                response = self._client.get(f"{self.url}/v1/models")
            except httpx.HTTPError as error:
                raise unreachable(self.url, error) from None
            self.model = _first_model(self.url, response)
        return self.model

    def ask(self, prompt: str, *, max_tokens: int | None = None, temperature: float | None = None) -> Iterator[str]:
        """Yields the answer's text as it comes, and keeps question and answer when it is whole. Of a model without a
        chat template, what `prompt` goes on with; nothing is kept."""
        question: Message = {"role": "user", "content": prompt}
        model, parts = self.choose_model(), list[str]()
        try:
            chat = _request(self.url, model, [*self.messages, question], max_tokens, temperature)
            for text in () if self.plain else self._stream(*chat):
                parts.append(text)
                yield text
        except NoChatTemplate:
            self.plain = True
        if self.plain:
            yield from self._stream(*_request(self.url, model, prompt, max_tokens, temperature))
            return
        self.messages += [question, {"role": "assistant", "content": "".join(parts)}]

    def _stream(self, url: str, body: dict[str, object]) -> Iterator[str]:
        try:
            with self._client.stream("POST", url, json=body, headers=self._headers) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response)
                answer = _Answer(self.url, self.on_progress)
                for line in response.iter_lines():
                    if text := answer.take(line):
                        yield text
                    if answer.whole:
                        return
        except httpx.HTTPError as error:
            raise unreachable(self.url, error) from None
        raise _broken_off()


async def answer_once(
    url: str,
    prompt: str,
    *,
    max_tokens: int,
    model: str = "",
    api_key: str = "",
    trust: ssl.SSLContext | bool = True,
    plain: bool = False,
) -> AsyncIterator[str]:
    """The greedy answer to a single question, or with `plain` what a text goes on with, as it comes; leaving it early
    ends it at the gateway too. `model`: empty: the first that the gateway lists. Raises `NoChatTemplate` for a question
    to a model that knows no conversations, `TemplateRefused` where its template takes none such as this."""
    url = _checked(url)
    async with httpx.AsyncClient(**http_options(api_key, trust, _WAITS)) as client:
        try:
            model = model or _first_model(url, await _models(client, url))
            said = prompt if plain else [{"role": "user", "content": prompt}]
            where, body = _request(url, model, said, max_tokens, 0.0)
            async with client.stream("POST", where, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refusal(response)
                answer = _Answer(url)
                async for line in response.aiter_lines():
                    if text := answer.take(line):
                        yield text
                    if answer.whole:
                        return
        except httpx.HTTPError as error:
            raise unreachable(url, error) from None
    raise _broken_off()


# --- the API, as far as it is spoken here --------------------------------------------------------


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigurationError(f"{url!r} is not the address of a gateway; write it as http://host:port.")
    return url.rstrip("/")


def _request(
    url: str, model: str, said: list[Message] | str, max_tokens: int | None, temperature: float | None
) -> tuple[str, dict[str, object]]:
    """Where messages go, or a text that a model goes on with, and as what."""
    plain = isinstance(said, str)
    tokens = PLAIN_TOKENS if plain and not max_tokens else max_tokens
    body: dict[str, object] = {"model": model, "prompt" if plain else "messages": said, "stream": True}
    options = {"max_tokens": tokens, "temperature": temperature}
    body |= {name: value for name, value in options.items() if value is not None}
    return f"{url}/v1/{'completions' if plain else 'chat/completions'}", body


async def _models(client: httpx.AsyncClient, url: str) -> httpx.Response:
    """What a gateway lists. It may hear a moment later than whoever asks that the first ring is up."""
    response = await client.get(f"{url}/v1/models")
    for _ in range(LISTINGS):
        if response.status_code != 503:
            break
        await asyncio.sleep(LISTING_PAUSE)
        response = await client.get(f"{url}/v1/models")
    return response


def _first_model(url: str, response: httpx.Response) -> str:
    if response.status_code != 200:
        raise _refusal(response)
    models = _said(url, response.content).data
    if models is None:
        raise _no_gateway(url)
    if not models:
        raise Unavailable("The gateway serves no model yet; wait until a group is ready.")
    return models[0].id


_PROGRESS = re.compile(r"prompt (\d{1,12})/(\d{1,12})", re.ASCII)  # a comment of the stream


class _Answer:
    """The text of one answer, from the lines of its stream."""

    def __init__(self, url: str, on_progress: Callable[[int, int], None] | None = None) -> None:
        self._url, self._on_progress = url, on_progress
        self._events = EventReader()
        self.whole = False  # whether the stream has ended in good order

    def take(self, line: str) -> str:
        """What `line` adds to it. Raises what the gateway says where it ends the stream with an error."""
        event = self._events.take(line)
        if event is None:
            if self._on_progress is not None and (progress := _PROGRESS.fullmatch(self._events.comment)):
                self._on_progress(int(progress[1]), int(progress[2]))
            return ""
        if event.data == "[DONE]":
            self.whole = True
            return ""
        said = _said(self._url, event.data)
        if said.error is not None:
            raise RyzansteinError(said.error.message)
        return "".join(choice.delta.content or choice.text for choice in said.choices)


def _said(url: str, data: str | bytes) -> _Said:
    try:
        return msgspec.json.decode(data, type=_Said)
    except msgspec.DecodeError:
        raise _no_gateway(url) from None


def _refusal(response: httpx.Response) -> RyzansteinError:
    try:
        error = msgspec.json.decode(response.content, type=_Said).error
    except msgspec.DecodeError:
        error = None
    error = error or _ErrorBody(f"The gateway answered {response.status_code} {response.reason_phrase}.")
    if response.status_code == 401:
        return KeyNeeded(f"{error.message} Here: set RYZANSTEIN_API_KEY.")
    return _KINDS.get(error.code, RyzansteinError)(error.message)


def unreachable(url: str, error: httpx.HTTPError) -> Unavailable:
    return Unavailable(
        f"The gateway at {url} did not answer ({error or type(error).__name__}); start the stack with "
        "`ryzanstein up`, or name another gateway with --url."
    )


def _no_gateway(url: str) -> ConfigurationError:
    return ConfigurationError(
        f"What answers at {url} is not a gateway: it does not speak OpenAI's API; name another with --url."
    )


def _broken_off() -> Unavailable:
    return Unavailable("The gateway closed the stream before the answer was whole; ask again.")
