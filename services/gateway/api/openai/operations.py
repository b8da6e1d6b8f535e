"""The operations of chat, completions, models and generations, and of what every service answers."""

from typing import Any

from services.gateway.api.cluster import ClusterState
from services.gateway.api.management.keys import ApiKeyList
from services.gateway.api.openai import shapes
from services.gateway.api.openai.completions import Cancelled
from services.gateway.api.openai.vllm import (
    PING,
    Detokenized,
    DetokenizeRequest,
    Load,
    ModelQuery,
    Pong,
    RenderedPrompt,
    Tokenized,
    TokenizeRequest,
    TokenizerInfo,
    Version,
)
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import GENERATING, TEXT, Operation
from services.gateway.core.pagination import PageQuery
from services.gateway.intake.embeddings import EmbeddingRequest
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.streams.reading import GenerationState
from shared.service.endpoints import Health

CHAT = Operation(
    "POST /v1/chat/completions",
    "createChatCompletion",
    "Messages in, an answer out.",
    "Chat",
    "With `stream: true` the answer comes as server-sent events, the last of them `data: [DONE]`. The `id` of an "
    "event is a position in the generation's log: any gateway goes on behind it (`Last-Event-ID`).",
    request=ChatCompletionRequest,
    example={
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
        "max_tokens": 32,
    },
    response=shapes.ChatCompletion,
    events=(shapes.ChatCompletionChunk,),
    parameters=operation.GENERATING_HEADERS,
    errors=GENERATING,
)
COMPLETIONS = Operation(
    "POST /v1/completions",
    "createCompletion",
    "A prompt in, its continuation out.",
    "Completions",
    "`prompt` is a text, texts, token ids, or lists of token ids.",
    request=CompletionRequest,
    example={"model": "SmolLM2-135M-Instruct", "prompt": "Once upon a time", "max_tokens": 32},
    response=shapes.Completion,
    events=(shapes.Completion,),
    parameters=operation.GENERATING_HEADERS,
    errors=GENERATING,
)
EMBEDDINGS = Operation(
    "POST /v1/embeddings",
    "createEmbedding",
    "Texts in, vectors out.",
    "Embeddings",
    request=EmbeddingRequest,
    example={"model": "SmolLM2-135M-Instruct", "input": ["One text.", "Another."]},
    response=shapes.EmbeddingList,
    response_content=operation.OCTETS,
    parameters=operation.GENERATING_HEADERS,
    errors=GENERATING,
)
INVOCATIONS = Operation(
    "POST /invocations",
    "invoke",
    "Dispatches by the fields of the body, as in SageMaker and vLLM.",
    "Chat",
    "`messages`: a chat; `prompt`: a completion; `query`: a reranking; `queries` or `text_1`: scores; `input`: "
    "embeddings. Each as at its own path.",
    request=ChatCompletionRequest,
    example=CHAT.example,
    response=shapes.ChatCompletion,
    events=(shapes.ChatCompletionChunk,),
    parameters=operation.GENERATING_HEADERS,
    errors=GENERATING,
)
RENDER_CHAT = Operation(
    "POST /v1/chat/completions/render",
    "renderChatCompletion",
    "The tokens that the model would read of a chat, as in vLLM.",
    "Tokens",
    request=ChatCompletionRequest,
    example=CHAT.example,
    response=RenderedPrompt,
    errors=(404,),
)
RENDER_COMPLETION = Operation(
    "POST /v1/completions/render",
    "renderCompletion",
    "The tokens that the model would read of each prompt, as in vLLM.",
    "Tokens",
    request=CompletionRequest,
    example=COMPLETIONS.example,
    response=list[RenderedPrompt],
    errors=(404,),
)
TOKENIZE = tuple(
    Operation(
        f"POST {prefix}/tokenize",
        name,
        "The tokens of a prompt or a conversation, as in vLLM.",
        "Tokens",
        request=TokenizeRequest,
        example={"model": "SmolLM2-135M-Instruct", "prompt": "Once upon a time"},
        response=Tokenized,
        errors=(404,),
    )
    for prefix, name in (("", "tokenize"), ("/v1", "createTokens"))
)
DETOKENIZE = tuple(
    Operation(
        f"POST {prefix}/detokenize",
        name,
        "The text of tokens, as in vLLM.",
        "Tokens",
        request=DetokenizeRequest,
        example={"model": "SmolLM2-135M-Instruct", "tokens": [1, 2]},
        response=Detokenized,
        errors=(404,),
    )
    for prefix, name in (("", "detokenize"), ("/v1", "createText"))
)
TOKENIZER_INFO = tuple(
    Operation(
        f"GET {prefix}/tokenizer_info",
        name,
        "The configuration of a model's tokenizer, as in vLLM.",
        "Tokens",
        response=TokenizerInfo,
        query=ModelQuery,
        errors=(404,),
    )
    for prefix, name in (("", "tokenizerInfo"), ("/v1", "retrieveTokenizer"))
)
GENERATION = Operation(
    "GET /v1/generations/{generation}",
    "retrieveGeneration",
    "The output of a generation so far.",
    "Generations",
    "At any gateway, for as long as the journal keeps its tokens.",
    response=GenerationState,
    errors=(504,),
)
CANCEL = Operation(
    "DELETE /v1/generations/{generation}",
    "cancelGeneration",
    "Ends a generation, for everybody who reads it.",
    "Generations",
    "What had come of it by then stays readable.",
    response=Cancelled,
    errors=(504,),
)
GENERATION_STREAM = Operation(
    "GET /v1/generations/{generation}/stream",
    "streamGeneration",
    "The events of a generation, from where you stand.",
    "Generations",
    "In the format of the endpoint that began it; without `Last-Event-ID` from the beginning.",
    events=(shapes.ChatCompletionChunk, shapes.Completion, shapes.TypedEvent),
    lines=(dict[str, Any],),
    parameters=(operation.LAST_EVENT,),
    errors=(504,),
)
CLUSTER = Operation(
    "GET /v1/cluster",
    "retrieveCluster",
    "Rings, services, and what this gateway is generating.",
    "Operations",
    "Nothing of what anybody wrote or reads, and no id with which it could be read.",
    response=ClusterState,
)
KEYS = Operation(
    "GET /v1/keys",
    "listKeys",
    "Who has API keys, and what of their limits is used.",
    "Operations",
    "The newest first; no secrets. For keys made with `--view-keys`; others get 403 `insufficient_permissions`.",
    response=ApiKeyList,
    query=PageQuery,
    errors=(404,),
)
SERVER_VERSION = Operation(
    "GET /version", "version", "The version of Ryzanstein, as in vLLM.", "Operations", response=Version
)
PINGS = tuple(
    Operation(f"{method} {PING}", name, "200 while the process lives.", "Operations", response=Pong)
    for method, name in (("GET", "ping"), ("POST", "pingByPost"))
)
LOAD = Operation("GET /load", "load", "Requests that this gateway is answering.", "Operations", response=Load)
HEALTH = Operation(
    "GET /health", "health", "200 while the process lives.", "Operations", response=Health, plain=True
)
READY = Operation(
    "GET /ready",
    "ready",
    "200 when the gateway can work, else 503 with the reason.",
    "Operations",
    response=Health,
    errors=(503,),
    plain=True,
)
METRICS = Operation(
    "GET /metrics",
    "metrics",
    "Prometheus metrics.",
    "Operations",
    response_content={TEXT: {"type": "string"}},
    plain=True,
)
DOCUMENT = Operation("GET /openapi.json", "openapi", "This document.", "Operations", response=shapes.Document)
OPS = (HEALTH, READY, METRICS)
