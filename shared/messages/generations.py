"""What is generated: requests with their sampling parameters, and the tokens that come of them."""

from collections.abc import Sequence
from typing import Literal

import msgspec

Lane = Literal["recovery", "interactive", "batch"]
LANES: tuple[Lane, ...] = ("recovery", "interactive", "batch")  # intake lanes, most urgent first

# Why a generation ended; empty while it goes on.
FinishReason = Literal["", "stop", "length", "cancelled", "error"]


# What of earlier tokens is read beside the first and the last ones: the pages (KV blocks) that score best, or none.
SparseKind = Literal["pages", "window"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. Neutral values mean "off"."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    # Unsigned 64 bits. The random number of a token depends on (seed, position) alone, so that a
    # continuation on another ring draws what the first ring would have drawn.
    seed: int = 0
    repetition_penalty: float = 1.0  # over prompt and output, as in CTRL (arXiv:1909.05858)
    presence_penalty: float = 0.0  # over the output only, as in OpenAI's API
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int = -1  # -1: none; 0: of the chosen token; k: also of the k most likely tokens
    min_tokens: int = 0  # output tokens before which none of the request's stop tokens is drawn
    allowed_token_ids: list[int] = []  # the only tokens that may be drawn; empty: all
    bad_words: list[list[int]] = []  # tokens that must not stand in the output one after the other


class Grammar(msgspec.Struct, frozen=True):
    """What the output's text must match. The ring masks the tokens that cannot follow; where an attempt
    continues another's tokens, it brings its state up to date with them first."""

    # `json_schema`: a JSON Schema (`{"type": "object"}` is any object); `lark`: a grammar in Lark's notation.
    kind: Literal["json_schema", "regex", "lark"]
    text: str


class SparseAttention(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which earlier tokens a token reads, in the layers that attend to all: a function of its position alone.

    Counted in tokens; what is read are whole KV blocks, so that a block of which a token counts is read whole.
    """

    # pages: those of the blocks between that score best, too; window: sinks and recent tokens alone, so that text
    # between is never seen again (StreamingLLM, arXiv:2309.17453).
    kind: SparseKind = "pages"
    threshold: int = 8192  # tokens at positions below it read all that is before them
    sinks: int = 64  # first tokens, which are always read
    recent: int = 1024  # last tokens, which are always read
    budget: int = 2048  # tokens in chosen blocks that are read at least; of kind pages
    # Of the position: as many tokens in chosen blocks, where that is more than the budget; of kind pages.
    share: float = 0.125
    dense_layers: int = 2  # first layers, in which all is read


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generation: what a ring needs to produce it, and who reads its tokens."""

    generation_id: str
    # The client's `x-request-id`: for logs and traces, not an identity (n generations share it).
    request_id: str
    model: str
    consumer: str  # whose token subject the frames go to: a gateway's or batch runner's instance id
    prompt: Sequence[int]  # in a gateway, which keeps many of them, an array of 4 bytes a token
    max_tokens: int  # output tokens in all, those in `generated` included
    sampling: SamplingParams = SamplingParams()
    # Ends the generation; the model's end-of-sequence ids among them unless they are ignored.
    stop_token_ids: list[int] = []
    generated: list[int] = []  # tokens that an earlier attempt produced: the ring continues after them
    attempt: int = 0
    session: str = ""  # key of the conversation for sticky routing; empty: none
    lane: Lane = "interactive"
    tenant: str = ""
    deadline: float = 0.0  # Unix seconds after which nobody waits for the first token; 0: none
    grammar: Grammar | None = None
    # What the output is expected to be: drafts are taken from it. Changes how fast it comes and nothing else.
    prediction: list[int] = []
    # The prompt's vector is wanted and no output: `max_tokens` is 1, and the only entry has a `vector`.
    embed: bool = False
    # W3C Trace Context of the span that this came from, where the request is sampled; empty: nobody traces it.
    traceparent: str = ""
    tracestate: str = ""
    # Log probabilities of the prompt's tokens, told with the first output: -1: none; 0: of the tokens alone; k: also
    # of the k most likely ones at each position. Not of a later attempt that brings `generated` tokens: they came with
    # these. With them, and without any, `max_tokens` may be 0: then nothing is generated.
    prompt_logprobs: int = -1
    claim: int = 0  # the claim under which the gateway that handed it in owns the generation; see `Claimed`
    # Requests share KV blocks only with those of the same salt; empty: with all that have none.
    cache_salt: str = ""
    priority: int = 0  # among a tenant's own requests of a lane that wait the one with the least goes first
    # Why the ring died that computed an earlier attempt when it did (`RingDeath.cause`): this may be what killed it,
    # and is computed in steps of its own. Empty: it is not suspected.
    suspected: str = ""
    adapter: str = ""  # digest of the LoRA adapter that computes it; empty: the model alone
    # As `embed`, with the logits of the model's classes (`ModelCard.labels`) in the place of a vector.
    classify: bool = False
    # As `embed`, with the log probabilities of these tokens behind the prompt, in their order: what a reranker that
    # answers yes or no is asked for. At most `limits.LOGPROB_TOKEN_IDS`. Empty: the prompt is to be continued.
    logprob_token_ids: list[int] = []
    # Index of the first prompt token that belongs to the second text of a pair, for models that tell segments apart
    # (BERT's token_type_ids); 0: there is one segment.
    second_segment: int = 0
    # Seconds after its end for which its session's KV blocks stay pinned at least, while pins have room; 0: as long as
    # those of any session; negative: they are not pinned.
    cache_ttl: float = 0.0
    # Not all earlier tokens are read from some position on; None: all are.
    sparse: SparseAttention | None = None
    # The prompt's blocks are wanted, and its output by nobody: `max_tokens` is 1. In a ring it makes way for all
    # others of the interactive lane, and goes before the batch lane.
    prefill: bool = False

    @property
    def pools(self) -> bool:
        """Whether one vector is wanted of the prompt, and no output."""
        return self.embed or self.classify or bool(self.logprob_token_ids)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token, and of the most likely ones at its position (descending)."""

    logprob: float
    top: list[tuple[int, float]] = []


class TokenEntry(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The new tokens of one generation."""

    generation_id: str
    attempt: int
    # Index of `tokens[0]` among the generation's output tokens, counted from 0 over all attempts.
    position: int
    tokens: list[int]
    finish: FinishReason = ""
    logprobs: list[TokenLogprobs] | None = None
    # Prompt tokens found in the KV cache; set in the attempt's first entry that has tokens.
    cached_tokens: int = 0
    error_code: str = ""
    error: str = ""
    retryable: bool = False
    # Of a request to embed or to classify, or with `logprob_token_ids`, with finish "stop" and no tokens: float32,
    # little-endian. What is embedded has the length 1 where `ModelCard.normalized`; classes are logits.
    vector: bytes = b""
    # Where the request has `prompt_logprobs`, in its entry at position 0 that has tokens or ends it: of each token of
    # the prompt but the first, little-endian: float32 log probability, int32 rank (1: the most likely), and
    # `prompt_logprobs` times (int32 token, float32 log probability), the most likely first.
    prompt_scores: bytes = b""
    # As the request's; told as the attempt is taken on, for whoever takes the generation over.
    suspected: str = ""
    fingerprint: str = ""  # of the ring (`ModelCard.fingerprint`); told as the attempt is taken on
    # Tokens of the prompt that are computed by now, the cached ones among them: told at most once a second of a prompt
    # that takes longer, in entries of their own without tokens. 0: not told.
    computed: int = 0


class TokenFrame(msgspec.Struct, frozen=True, array_like=True):
    """All new tokens of one step for one consumer."""

    group: str  # empty when a scheduler ends a generation that no group has taken
    # Life of the group's ring: grows with each restart, so that the dead can be told from the living.
    epoch: int
    step: int
    entries: list[TokenEntry]
