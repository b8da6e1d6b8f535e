"""A large request is decoded in its turn, whatever its gateway has to ask before."""

from typing import Any

import httpx
import pytest

from services.gateway.core.large_requests import LARGE_REQUEST, LargeRequests
from services.gateway.dialects.openai.dialect import CompletionEndpoint
from services.gateway.lifecycle.idempotency import IdempotencyKeys
from tests.integration.gateway.fake_ring import MODEL


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "once"}])
async def test_nothing_is_asked_between_its_turn_and_its_decoding(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    seen: list[str] = []
    decoded, get = CompletionEndpoint.decode, IdempotencyKeys.get

    async def turn(self: LargeRequests, tenant: str, size: int) -> None:
        seen.append("turn")

    async def asked(self: IdempotencyKeys, name: str, print_: str) -> Any:
        seen.append("key")
        return await get(self, name, print_)

    def decode(self: CompletionEndpoint, *given: Any, **named: Any) -> Any:
        seen.append("decoded")
        return decoded(self, *given, **named)

    monkeypatch.setattr(LargeRequests, "turn", turn)
    monkeypatch.setattr(IdempotencyKeys, "get", asked)
    monkeypatch.setattr(CompletionEndpoint, "decode", decode)
    body = {"model": MODEL, "prompt": "x" * LARGE_REQUEST, "max_tokens": 1}
    await http.post("/v1/completions", json=body, headers=headers)
    assert seen[-2:] == ["turn", "decoded"]
