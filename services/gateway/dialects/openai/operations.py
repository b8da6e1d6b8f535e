"""The operations of chats and completions, and of what a model would read of them."""

from services.gateway.api import shapes
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import GENERATING, Operation
from services.gateway.dialects.openai.rendering import RenderedPrompt
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
