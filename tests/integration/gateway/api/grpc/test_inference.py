"""The methods of the gRPC API, called by grpcio's client."""

import asyncio
from typing import Any

import grpc
import pytest

from services.gateway.api.grpc.generated import inference_pb2 as pb
from shared.messages import GenerationRequest
from tests.integration.gateway.api.grpc.conftest import MODEL, PROMPT, QUESTION, Client, text_of
from tests.integration.gateway.api.grpc.test_errors import failure
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import FakeRing, say, saying
from tests.integration.gateway.intake.test_prompt_logprobs import scoring


async def test_generate_streams_text_and_ends_with_usage(client: Client) -> None:
    call = client.Generate(PROMPT, metadata=[("x-request-id", "trace-9")])
    events = [event async for event in call]
    assert text_of(events) == "Hello, world!"
    assert events[0].id.startswith("cmpl-")
    assert not any(event.id for event in events[1:])
    assert [delta.finish_reason for event in events for delta in event.choices][-1] == pb.FINISH_REASON_STOP
    assert events[-1].usage == pb.Usage(prompt_tokens=1, completion_tokens=13, cached_tokens=1)
    assert events[-1].position == "15"
    assert ("x-request-id", "trace-9") in list(await call.trailing_metadata())
    assert await call.code() == grpc.StatusCode.OK


async def test_how_much_of_a_long_prompt_is_computed(client: Client, ring: FakeRing) -> None:
    """To those who ask for it, in messages of their own; by Attach too, whoever began it."""
    attached = asyncio.Event()

    async def slow(fake: FakeRing, request: GenerationRequest) -> None:
        await fake.emit(request, 0, [], cached=1, computed=1)
        await attached.wait()
        await say(fake, request, "Hello")

    ring.behave = slow
    asking = pb.OutputOptions(return_progress=True)
    begun = aiter(client.Generate(pb.GenerateRequest(model=MODEL, text="long", output=asking)))
    first = await anext(begun)
    assert first.id
    assert (first.prompt_progress.total, first.prompt_progress.cached) == (4, 1)
    assert first.prompt_progress.processed == 1
    assert (first.position, len(first.choices)) == ("", 0)
    tokens = pb.OutputOptions(kind=pb.OUTPUT_KIND_TOKENS, return_progress=True)
    seen = aiter(client.Attach(pb.AttachRequest(generation_id=first.id, output=tokens)))
    assert (await anext(seen)).prompt_progress.processed == 1
    attached.set()
    assert text_of([event async for event in begun]) == "Hello"
    shown = [token async for event in seen for delta in event.choices for token in delta.token_ids]
    assert bytes(shown).startswith(b"Hello")


async def test_chat_whole_is_one_message(client: Client, ring: FakeRing) -> None:
    request = pb.ChatRequest()
    request.CopyFrom(QUESTION)
    request.output.whole = True
    request.sampling.n = 2
    (event,) = [event async for event in client.Chat(request)]
    assert [(delta.index, delta.text, delta.finish_reason) for delta in event.choices] == [
        (0, "Hello, world!", pb.FINISH_REASON_STOP),
        (1, "Hello, world!", pb.FINISH_REASON_STOP),
    ]
    assert event.id.startswith("chatcmpl-")
    assert event.usage.completion_tokens == 26
    assert [request.lane for request in ring.requests] == ["interactive", "interactive"]
    assert bytes(ring.requests[0].prompt) == b"Hi?\n"


async def test_tokens_in_tokens_out_with_log_probabilities(client: Client, ring: FakeRing) -> None:
    request = pb.GenerateRequest(
        model=MODEL,
        tokens=pb.TokenIds(ids=[1, 2, 3]),
        sampling=pb.SamplingParameters(max_tokens=2, logprobs=1, seed=2**64 - 1),
        output=pb.OutputOptions(kind=pb.OUTPUT_KIND_TOKENS),
    )
    events = [event async for event in client.Generate(request)]
    deltas = [delta for event in events for delta in event.choices]
    assert [token for delta in deltas for token in delta.token_ids] == list(b"He")
    assert not any(delta.text for delta in deltas)
    scores = [score for delta in deltas for score in delta.logprobs]
    assert [(score.token_id, score.token, score.logprob) for score in scores] == [
        (ord("H"), b"H", -0.5),
        (ord("e"), b"e", -0.5),
    ]
    assert [(top.token_id, top.logprob) for top in scores[0].top] == [(ord("a"), -1.0)]
    assert deltas[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert ring.requests[0].prompt == [1, 2, 3]
    assert ring.requests[0].sampling.seed == 2**64 - 1


async def test_tokenize_and_back(client: Client) -> None:
    text = await client.Tokenize(pb.TokenizeRequest(model=MODEL, text="Hi"))
    assert (list(text.token_ids), text.context_length) == ([72, 105], 2048)
    said = pb.Conversation(messages=QUESTION.messages)
    chat = await client.Tokenize(pb.TokenizeRequest(model=MODEL, conversation=said))
    assert bytes(chat.token_ids) == b"Hi?\n"
    back = await client.Detokenize(pb.DetokenizeRequest(model=MODEL, token_ids=chat.token_ids))
    assert back.text == "Hi?\n"


async def test_models(client: Client) -> None:
    (model,) = (await client.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.context_length, model.vocabulary_size) == (MODEL, 2048, 256)
    assert model.create_time.seconds == 1_700_000_000


async def test_calls_are_counted_beside_the_rest_apis(client: Client, gateway: RunningGateway) -> None:
    assert [event async for event in client.Generate(PROMPT)]
    async with gateway.http() as http:
        metrics = (await http.get("/metrics")).text
    path = "/ryzanstein.v1.InferenceService/Generate"
    assert f'requests_total{{model="{MODEL}",route="{path}",status="200"}} 1.0' in metrics
    assert "ryzanstein_gateway_output_tokens_total" in metrics


async def test_several_calls_at_once_on_one_connection(client: Client, ring: FakeRing) -> None:
    ring.behave = saying("a" * 500)
    request = pb.GenerateRequest(model=MODEL, text="x", sampling=pb.SamplingParameters(max_tokens=500))
    calls = [client.Generate(request) for _ in range(20)]
    for call in calls:
        assert text_of([event async for event in call]) == "a" * 500


async def test_variables_of_the_chat_template(client: Client) -> None:
    for name, value in (("chat_template_kwargs_json", "[1]"), ("chat_template_kwargs_json", "{")):
        wrong = pb.ChatRequest(model=MODEL, messages=QUESTION.messages, **{name: value})
        error = await failure(client.Chat(wrong))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "'chat_template_kwargs_json'" in (error.details() or "")


@pytest.mark.parametrize("kind", [pb.OUTPUT_KIND_TEXT, pb.OUTPUT_KIND_TOKENS])
async def test_log_probabilities_of_a_prompt_are_those_of_rest(client: Client, ring: FakeRing, kind: Any) -> None:
    ring.behave = scoring
    request = pb.GenerateRequest(
        model=MODEL,
        text="xyz",
        sampling=pb.SamplingParameters(max_tokens=1, prompt_logprobs=1),
        output=pb.OutputOptions(kind=kind, whole=True),
    )
    (event,) = [event async for event in client.Generate(request)]
    assert [(one.token_id, one.token, one.logprob, one.rank) for one in event.prompt_logprobs] == [
        (ord("y"), b"y", -1.0, 2),
        (ord("z"), b"z", -2.0, 3),
    ]
    assert [[(top.token, top.logprob) for top in one.top] for one in event.prompt_logprobs] == [[(b"a", 0.0)]] * 2
    request.output.whole = False
    refused = await failure(client.Generate(request))
    assert "output.whole" in str(refused.details())


async def test_an_echo_has_log_probabilities_of_all_tokens_but_the_first(client: Client, ring: FakeRing) -> None:
    ring.behave = scoring
    sampling = pb.SamplingParameters(max_tokens=1, logprobs=0)
    for whole in (True, False):
        output = pb.OutputOptions(whole=whole)
        request = pb.GenerateRequest(model=MODEL, text="xy", sampling=sampling, echo=True, output=output)
        events = [event async for event in client.Generate(request)]
        assert text_of(events) == "xyo"
        scores = [score for event in events for delta in event.choices for score in delta.logprobs]
        assert [score.token for score in scores] == [b"y", b"o"]
