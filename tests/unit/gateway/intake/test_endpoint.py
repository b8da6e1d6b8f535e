"""Which endpoint a body is for, where its path does not say it."""

import pytest

from services.gateway.core.errors import InvalidParameter, RouteError
from services.gateway.dialects.registry import DIALECTS
from services.gateway.intake.endpoint import Endpoints

ENDPOINTS = Endpoints(one for dialect in DIALECTS for one in dialect.endpoints)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"messages": [], "prompt": "", "input": ""}', "chat.completions"),
        (b'{"input": "", "prompt": ""}', "completions"),
        (b'{"documents": [], "input": "", "query": ""}', "rerank"),
        (b'{"text_1": "", "input": ""}', "score"),
        (b'{"queries": []}', "score"),
        (b'{"input": ""}', "embeddings"),
    ],
)
def test_an_invocation_is_known_by_the_first_field_in_order(body: bytes, name: str) -> None:
    assert ENDPOINTS.named("invocations", body).name == name


def test_what_is_for_none_is_refused() -> None:
    fields = "messages, prompt, query, queries, text_1, input"
    with pytest.raises(InvalidParameter, match=f"one of: {fields}"):
        ENDPOINTS.named("invocations", b'{"": "", "documents": []}')
    with pytest.raises(RouteError, match="'nothing' is not served here"):
        ENDPOINTS.named("nothing", b"{}")


def test_a_conversation_is_a_responses_by_its_input_and_else_a_chat() -> None:
    found = ENDPOINTS.of_conversation(b'{"input": ""}')
    assert found.name == "responses"
    assert ENDPOINTS.of_conversation(b'{"messages": [], "": ""}') is None
