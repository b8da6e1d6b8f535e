"""ryzanstein.v1.InferenceService: each method from its request to its answer."""

from collections.abc import Awaitable, Callable, Mapping

from google.protobuf.message import Message as Protobuf
from google.protobuf.timestamp_pb2 import Timestamp

from services.gateway.api.backend import GatewayBackend
from services.gateway.api.grpc import requests
from services.gateway.api.grpc.call import GrpcCall
from services.gateway.api.grpc.encoding import EmbedFormat
from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.api.grpc.requests import MessageT, decode
from services.gateway.api.grpc.server import RpcMethod
from services.gateway.api.grpc.session import (
    CHAT,
    GENERATE,
    ChatSession,
    context_of,
    positions_of,
    send_events,
    view_of,
)
from services.gateway.core.errors import missing
from services.gateway.core.large_requests import LARGE_REQUEST
from services.gateway.intake.sampling.params import check_token_ids
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages import ModelCard

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
Answer = Callable[[GrpcCall], Awaitable[None]]
Reply = Awaitable[Protobuf]


def unary(backend: GatewayBackend, kind: type[MessageT], answer: Callable[[GrpcCall, MessageT], Reply]) -> Answer:
    """Answers a call that has one message, of that `kind`, with the one that `answer` makes of it."""

    async def answered(call: GrpcCall) -> None:
        given = decode(kind, call.take())
        with backend.active():
            reply = await answer(call, given)
        await call.send(reply.SerializeToString())

    return answered


class Inference:
    """The service's methods."""

    def __init__(self, backend: GatewayBackend, calls: Mapping[str, Answer]) -> None:
        """`calls`: further methods, by name."""
        self._backend = backend
        self._calls = calls

    def methods(self) -> dict[str, RpcMethod]:
        """By path."""
        single = {
            "Generate": self.generate,
            "Chat": self.chat,
            "Attach": self.attach,
            "Cancel": unary(self._backend, pb.CancelRequest, self.cancel),
            "Tokenize": unary(self._backend, pb.TokenizeRequest, self.tokenize),
            "Detokenize": unary(self._backend, pb.DetokenizeRequest, self.detokenize),
            "ListModels": unary(self._backend, pb.ListModelsRequest, self.list_models),
            "Embed": self.embed,
            **self._calls,
        }
        found = {f"/{SERVICE}/{name}": RpcMethod(self._in_turn(answer)) for name, answer in single.items()}
        return found | {f"/{SERVICE}/ChatSession": RpcMethod(self.chat_session, streamed=True)}

    def _in_turn(self, answer: Answer) -> Answer:
        """`answer`, which decodes a large message in its turn."""

        async def answered(call: GrpcCall) -> None:
            if call.waiting > LARGE_REQUEST:
                await self._backend.parts.intake.large.turn(call.principal.tenant, call.waiting)
            await answer(call)

        return answered

    async def generate(self, call: GrpcCall) -> None:
        given = decode(pb.GenerateRequest, call.take())
        await self._answer(call, GENERATE, given, requests.completion_request(given))

    async def chat(self, call: GrpcCall) -> None:
        given = decode(pb.ChatRequest, call.take())
        await self._answer(call, CHAT, given, requests.chat_request(given))

    async def chat_session(self, call: GrpcCall) -> None:
        """ChatSession: until the client has ended its side and every generation has ended."""
        await ChatSession(call, self._backend).serve()

    async def _answer(
        self,
        call: GrpcCall,
        endpoint: str,
        given: pb.GenerateRequest | pb.ChatRequest,
        request: ChatCompletionRequest | CompletionRequest,
    ) -> None:
        with self._backend.active():
            intake = self._backend.parts.intake
            view = view_of(given.output)
            context = context_of(call, self._backend.settings)
            context.view = view
            print_ = requests.fingerprint(given) if context.key else ""
            run = await intake.prepare_decoded(endpoint, request, context, print_)
            with call.reading(run):
                await run.begin()
                await send_events(run, given.output, call.send, call.write)

    async def attach(self, call: GrpcCall) -> None:
        given = decode(pb.AttachRequest, call.take())
        with self._backend.active():
            run = await self._backend.parts.reading.attach(
                given.generation_id,
                positions_of(given),
                how="grpc",
                view=view_of(given.output),
                tenant=call.principal.tenant,
            )
            with call.reading(run):
                await send_events(run, given.output, call.send, call.write)

    async def cancel(self, call: GrpcCall, given: pb.CancelRequest) -> pb.CancelResponse:
        answer, going = await self._backend.parts.reading.cancel(given.generation_id, call.principal.tenant)
        call.model = answer.record.requests[0].model
        return pb.CancelResponse(cancelled=going)

    async def tokenize(self, call: GrpcCall, given: pb.TokenizeRequest) -> pb.TokenizeResponse:
        card, tokenizer = await self._tokenizer(call, given.model)
        kind = given.WhichOneof("input")
        if kind is None:
            raise missing("input", "text or conversation")
        if kind == "text":
            ids = await tokenizer.encode(given.text)
        else:
            chat = requests.conversation_request(given.model, given.conversation)
            ids = await self._backend.parts.intake.processor.chat_prompt(chat, call.principal.tenant)
        return pb.TokenizeResponse(token_ids=ids, context_length=card.context_length)

    async def detokenize(self, call: GrpcCall, given: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        card, tokenizer = await self._tokenizer(call, given.model)
        ids = list(given.token_ids)
        check_token_ids("token_ids", ids, card.vocab_size)
        text = await tokenizer.decode_many(ids, skip_special_tokens=given.skip_special_tokens)
        return pb.DetokenizeResponse(text=text)

    async def _tokenizer(self, call: GrpcCall, model: str) -> tuple[ModelCard, Tokenizer]:
        """Of a call that is counted. Raises `RateLimited`, `UnknownModel`."""
        intake = self._backend.parts.intake
        await intake.count(call.principal, {})
        card, tokenizer = await intake.processor.tokenizer(model, call.principal.tenant)
        call.model = card.model
        return card, tokenizer

    async def list_models(self, call: GrpcCall, given: pb.ListModelsRequest) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[_model(card) for card in self._backend.started.catalog.listed()])

    async def embed(self, call: GrpcCall) -> None:
        given = decode(pb.EmbedRequest, call.take())
        with self._backend.active():
            context = context_of(call, self._backend.settings)
            context.view = EmbedFormat
            print_ = requests.fingerprint(given) if context.key else ""
            request = requests.embedding_request(given)
            run = await self._backend.parts.intake.prepare_decoded("grpc.Embed", request, context, print_)
            with call.reading(run):
                await run.begin()
                await call.send(await run.collect())


def _model(card: ModelCard) -> pb.Model:
    return pb.Model(
        id=card.model,
        create_time=Timestamp(seconds=int(card.created)),
        context_length=card.context_length,
        vocabulary_size=card.vocab_size,
    )
