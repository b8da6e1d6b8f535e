"""The operations of chat, completions, models and generations, and of what every service answers."""

from services.gateway.api import shapes
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import GENERATING, Operation
from services.gateway.dialects.vllm.tokens import (
    Detokenized,
    DetokenizeRequest,
    ModelQuery,
    RenderedPrompt,
    Tokenized,
    TokenizeRequest,
    TokenizerInfo,
)
from services.gateway.intake.embeddings import EmbeddingRequest
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest

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
