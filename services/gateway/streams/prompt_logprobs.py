"""What a ring tells of the log probabilities of a prompt's tokens, and how it is shown.

prompt        t0      t1       t2
told                  row      row          `TokenEntry.prompt_scores`: nothing comes before t0
echo          null    -1.2     -0.4         among the log probabilities of a completion (OpenAI's)
list          null    {t1: ..} {t2: ..}     `prompt_logprobs` (vLLM's): by token id, the prompt's own token first
gRPC                  message  message      `GenerationEvent.prompt_logprobs`
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from services.gateway.lifecycle.request_state import RequestState
from services.gateway.streams.output import ScoredToken
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages import GenerationRequest, TokenLogprobs


class PromptRow(NamedTuple):
    """One token of a prompt."""

    logprob: float
    rank: int  # 1: the most likely
    top: list[tuple[int, float]]  # the most likely tokens, in this order


def rows_of(data: bytes, top: int) -> Iterator[PromptRow]:
    """What `data` says of each token but the first; `top`: most likely tokens that it has of each."""
    for logprob, rank, *pairs in struct.iter_unpack("<fi" + top * "if", data):
        yield PromptRow(logprob, rank, list(zip(pairs[::2], pairs[1::2], strict=True)))


class EchoedPrompt:
    """A prompt that is shown before its completion."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._tokens, self._tokenizer = request.prompt, tokenizer
        self._top, self._shown = request.prompt_logprobs, request.sampling.logprobs
        # Whether its tokens are shown with log probabilities.
        self.has_scores = self._top >= 0 and self._shown >= 0
        self.text = tokenizer.decode(self._tokens, skip_special_tokens=True)

    def scored(self, data: bytes) -> list[ScoredToken]:
        """Its tokens, with the log probabilities in `data` and where their texts begin."""
        rows = iter(rows_of(data, self._top))
        detokenizer = self._tokenizer.detokenizer([], skip_special_tokens=True)
        scored, offset = [], 0
        for at, token in enumerate(self._tokens):
            row = next(rows, None) if at else None
            logprobs = None if row is None else TokenLogprobs(row.logprob, row.top[: self._shown])
            scored.append(ScoredToken(token, logprobs, min(offset, len(self.text))))
            offset += len(detokenizer.feed([token]))
        return scored


class PromptList:
    """The list `prompt_logprobs` of one answer's prompts."""

    def __init__(self, answer: RequestState, tokenizer: Tokenizer) -> None:
        self._generations, self._tokenizer = answer.generations, tokenizer
        self._top = answer.record.prompt_logprobs  # most likely tokens that are shown
        self._texts: dict[int, str] = {}

    def of(self, choice: int, data: bytes) -> list[dict[str, dict[str, Any]] | None]:
        return [None, *(self._row(token, row) for token, row in self.rows(choice, data))]

    def rows(self, choice: int, data: bytes) -> Iterator[tuple[int, PromptRow]]:
        """Each token of the prompt but the first, with what is shown of it."""
        request = self._generations[choice].request
        for token, row in zip(request.prompt[1:], rows_of(data, request.prompt_logprobs), strict=False):
            yield token, row._replace(top=row.top[: self._top])

    def _row(self, token: int, row: PromptRow) -> dict[str, dict[str, Any]]:
        shown = {str(token): self._entry(token, row.logprob, row.rank)}
        for rank, (other, logprob) in enumerate(row.top, 1):
            if other != token:
                shown[str(other)] = self._entry(other, logprob, rank)
        return shown

    def _entry(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._tokenizer.token_bytes(token).decode(errors="replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": text}
