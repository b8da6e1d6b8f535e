"""What a gateway serves to a client that is to be started: which model, how much context, whether tools are called."""

import ssl
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from services.cli.chat_client import unreachable
from services.cli.commands.launch.clients import Client
from services.cli.gateway_client import http_options
from shared.errors import ConfigurationError, Unavailable

_TIMEOUT = 60.0  # seconds for an answer of one token, of a model that may have to be loaded first
_TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}, "required": []}},
}


class ServedModel(msgspec.Struct, frozen=True):
    """Of `/v1/models`."""

    id: str
    max_model_len: int | None = None


class _Said(msgspec.Struct, frozen=True):
    """Of a list of models, or of a refusal."""

    data: list[ServedModel] = []
    error: dict[str, Any] = {}


class Served:
    """Asks one gateway. Raises `ConfigurationError` or `Unavailable`, one sentence, where it gives no answer."""

    def __init__(self, url: str, api_key: str, trust: ssl.SSLContext | bool) -> None:
        self._url = url
        self._client = httpx.Client(**http_options(api_key, trust, httpx.Timeout(_TIMEOUT, connect=5.0)))

    def close(self) -> None:
        self._client.close()

    def model(self, name: str) -> ServedModel:
        """The model that was named, else the first that is served."""
        answer = self._ask("GET", "/v1/models")
        listed = msgspec.json.decode(answer.content, type=_Said).data if answer.status_code == 200 else []
        if answer.status_code == 401:
            raise ConfigurationError("The gateway asks for an API key; set RYZANSTEIN_API_KEY to one.")
        found = next((model for model in listed if name in ("", model.id)), None)
        if found is None and name:
            names = ", ".join(model.id for model in listed[:8]) or "none yet"
            raise ConfigurationError(f"The gateway at {self._url} serves no model {name}; it serves: {names}.")
        if found is None:
            raise Unavailable(
                f"The gateway at {self._url} serves no model yet; wait until `ryzanstein status` says so."
            )
        return found

    def unsuitable(self, model: ServedModel, client: Client) -> Sequence[str]:
        """What of the model does not suit the client, a sentence each."""
        told = []
        if model.max_model_len is not None and model.max_model_len < client.needs:
            told.append(
                f"{client.name} needs a context of some {client.needs:,} tokens for its instructions and a task, and "
                f"{model.id} has {model.max_model_len:,}: serve a model with more, or raise RYZANSTEIN_CONTEXT_LENGTH "
                "where that is what bounds it."
            )
        if client.calls_tools and (refusal := self._refuses_tools(model.id)):
            told.append(f"{model.id} calls no tools here ({refusal}): {client.name} can chat, and do nothing else.")
        return told

    def _refuses_tools(self, model: str) -> str:
        """Why a request with a tool is refused; empty: it is not, or nothing is known."""
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "tools": [_TOOL], "max_tokens": 1}
        answer = self._ask("POST", "/v1/chat/completions", body)
        if answer.status_code != 400:
            return ""
        return str(msgspec.json.decode(answer.content, type=_Said).error.get("message", "")).rstrip(".")

    def _ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            return self._client.request(method, f"{self._url}{path}", json=body)
        except httpx.HTTPError as error:
            raise unreachable(self._url, error) from None
