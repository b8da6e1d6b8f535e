"""The methods of the gRPC API, called by grpcio's client."""

import grpc

from services.gateway.grpc.generated import inference_pb2 as pb
from tests.integration.gateway.grpc.conftest import MODEL, Client, text_of

PROMPT = pb.GenerateRequest(model=MODEL, text="x")
QUESTION = pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role=pb.ROLE_USER, content="Hi?")])


async def test_generate_streams_text_and_ends_with_usage(client: Client) -> None:
    call = client.Generate(PROMPT, metadata=[("x-request-id", "trace-9")])
    events = [event async for event in call]
    assert text_of(events) == "Hello, world!"
    assert events[0].id.startswith("cmpl-")
    assert not any(event.id for event in events[1:])
    assert events[-1].choices[-1].finish_reason == pb.FINISH_REASON_STOP
    assert events[-1].usage == pb.Usage(prompt_tokens=1, completion_tokens=13, cached_tokens=1)
    assert ("x-request-id", "trace-9") in list(await call.trailing_metadata())
    assert await call.code() == grpc.StatusCode.OK
