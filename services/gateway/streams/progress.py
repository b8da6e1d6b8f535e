"""How far the prompts of an answer are, while they are being computed and nothing of it has come.

    SSE              : prompt 34816/131072                                    a comment, which clients pass over
    where asked for  "prompt_progress": {"total", "cache", "processed", "time_ms"}      llama.cpp's, in a chunk or event
    GET              X-Ryzanstein-Progress: 34816/131072

It is not of the log: it has no position, and a reader that comes later is told what was told last.
"""

from collections.abc import MutableMapping

import msgspec

from services.gateway.lifecycle.request_state import RequestState

PROGRESS_HEADER = "x-ryzanstein-progress"


class PromptProgress(msgspec.Struct, frozen=True):
    """llama.cpp's shape, in tokens of all prompts."""

    total: int
    cache: int  # found in the KV cache
    processed: int  # computed by now, those of the cache among them
    time_ms: int  # since the request came

    @property
    def header(self) -> str:
        """As the header and comments have it."""
        return f"{self.processed}/{self.total}"


def progress_of(answer: RequestState, now: float) -> PromptProgress | None:
    """None while nothing was told, and from the first token on. `now`: unix seconds. Each prompt counts once, however
    many choices share it."""
    for generation in answer.generations:
        if generation.computing:
            break
    else:
        return None
    computed: dict[int, int] = {}
    for generation in answer.generations:
        prompt = generation.request.prompt
        done = len(prompt) if generation.tokens or generation.ended else generation.computed
        computed[id(prompt)] = max(computed.get(id(prompt), 0), done)
    elapsed = max(0, round(1000 * (now - answer.record.created)))
    return PromptProgress(*answer.prompt_tokens, sum(computed.values()), elapsed)


def tell_progress(headers: MutableMapping[str, str], answer: RequestState, now: float) -> None:
    """Adds the header to those of a reply, where there is something to tell."""
    if (progress := progress_of(answer, now)) is not None:
        headers[PROGRESS_HEADER] = progress.header
