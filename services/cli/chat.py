"""A conversation with the gateway, streamed to the terminal."""

from collections.abc import Iterator

import httpx
import msgspec

from shared.errors import RyzansteinError, Unavailable

Message = dict[str, str]


class ChatClient:
    """Speaks to one gateway; keeps the conversation's messages and its session id."""

    def __init__(self, url: str, *, model: str = "", session: str = "", timeout: float = 600.0) -> None:
        self._url = url.rstrip("/")
        self._client = httpx.Client(timeout=httpx.Timeout(timeout, connect=5.0), trust_env=False)
        self._headers = {"x-session-id": session} if session else {}
        self.model = model
        self.messages: list[Message] = []

    def close(self) -> None:
        self._client.close()

    def choose_model(self) -> str:
        """The model that was named, else the first that the gateway serves."""
        if not self.model:
            models = self._get("/v1/models")["data"]
            if not models:
                raise Unavailable("The gateway serves no model yet; wait until a group is ready.")
            self.model = models[0]["id"]
        return self.model

    def ask(
        self, prompt: str, *, max_tokens: int | None = None, temperature: float | None = None
    ) -> Iterator[str]:
        """Yields the answer's text as it comes, and keeps question and answer when it is whole."""
        question: Message = {"role": "user", "content": prompt}
        body: dict[str, object] = {
            "model": self.choose_model(),
            "messages": [*self.messages, question],
            "stream": True,
        }
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if temperature is not None:
            body["temperature"] = temperature
        parts: list[str] = []
        for text in self._stream(body):
            parts.append(text)
            yield text
        self.messages += [question, {"role": "assistant", "content": "".join(parts)}]

    def _stream(self, body: dict[str, object]) -> Iterator[str]:
        try:
            with self._client.stream(
                "POST", f"{self._url}/v1/chat/completions", json=body, headers=self._headers
            ) as response:
                if response.status_code != 200:
                    response.read()
                    raise RyzansteinError(_error_text(response))
                yield from _deltas(response)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _get(self, path: str) -> dict[str, list[dict[str, str]]]:
        try:
            response = self._client.get(f"{self._url}{path}")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise RyzansteinError(_error_text(response))
        return msgspec.json.decode(response.content, type=dict)

    def _unreachable(self, error: httpx.HTTPError) -> Unavailable:
        return Unavailable(
            f"The gateway at {self._url} did not answer ({error or type(error).__name__}); start the stack with "
            "`ryzanstein up`, or name another gateway with --url."
        )


def _deltas(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        data = line[len("data: ") :]
        if data == "[DONE]":
            return
        event = msgspec.json.decode(data.encode())
        if "error" in event:
            raise RyzansteinError(event["error"]["message"])
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    raise Unavailable("The gateway closed the stream before the answer was whole; ask again.")


def _error_text(response: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(response.content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"The gateway answered {response.status_code} {response.reason_phrase}."
