"""A ring's draft model: a smaller one of the same vocabulary on the same ranks, which keeps its keys and values in page
layers of its own of the same KV blocks (docs/adr/0033).

What it proposes decides nothing: a proposal is put out where it is what the model that is served draws. So whatever
keeps it from computing is told, and the ring serves without.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog
import torch
from torch import Tensor

from services.executor.collectives.base import Collectives
from services.executor.core.draft_passes import DraftPasses, plan_for_draft
from services.executor.core.engine import BadLogits, DraftPlan, DraftToken
from services.executor.core.layer_state import LayerStates, page_layers
from services.executor.core.progress import Progress
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import ExecutorSettings
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.kv_cache.capacity import StepWidths, check_room, smallest
from services.executor.kv_cache.offload import BlockCopier, Spill
from services.executor.kv_cache.store import KvStore
from services.executor.model.card import read_json
from services.executor.model.catalogue import is_encoder
from services.executor.model.loading.checkpoints import resolve_model
from services.executor.model.pooling import is_classifier
from services.executor.sampling.candidates import RowLogits
from services.executor.sampling.sampler import Sampler
from services.executor.worker.runner import ModelRunner
from services.executor.worker.weights import Share, load_share
from shared.errors import ConfigurationError, ModelLoadError
from shared.model_store.locks import hold_model
from shared.models import HUB

log = structlog.get_logger(__name__)

MOST_UNSHARED = 128
"""Tokens that one of two tokenizers may have beyond the other's: special ones are added at the end."""
_NAMED = 3
"""Tokens that a refusal names."""
_UNKNOWN = DraftToken(0, 0.0)
"""A proposal that is none."""
_LEAVE_OUT = "choose a draft model of the same family, or leave out --draft-model."
_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_WEIGHTS = {".safetensors", ".bin", ".gguf"}

Compute = Callable[[StepPlan, Sequence[SamplingState]], Tensor | RowLogits]
"""Has all ranks compute a plan; the logits of its rows."""


# --- computing -----------------------------------------------------------------------------------


class DraftModel:
    """One rank's share of it."""

    def __init__(self, share: Share, runner: ModelRunner) -> None:
        self.share = share
        self.runner = runner
        self.vocab_size = runner.vocab_size
        self.context_length = share.facts.context_length

    def follow(self, plan: StepPlan, progress: Progress) -> None:
        """Computes the rows of a step of the model that is served."""
        if int(as_int32(plan.positions).min()) < self.context_length:
            self.runner.forward(self._own(plan), progress)

    def compress(self, plan: StepPlan) -> None:
        """Compresses its own keys and values of the blocks that a step fills which it does not follow: rounds of
        proposals have computed them, or nobody reads them."""
        self.runner.compress(plan)

    def forward(self, plan: StepPlan, progress: Progress) -> Tensor | RowLogits | None:
        """Computes a plan that is `of_draft`, as `ModelRunner.forward` does."""
        return self.runner.forward(self._own(plan), progress)

    def _own(self, plan: StepPlan) -> StepPlan:
        return plan_for_draft(plan, self.vocab_size, self.context_length)


class Proposer:
    """Draws a draft model's proposals, on rank 0. Keeps nothing between calls."""

    def __init__(self, vocab_size: int, context_length: int, block_size: int) -> None:
        """`vocab_size`: of the model that is served; `context_length`: of the draft model."""
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._block_size = block_size
        self._sampler = Sampler()

    def propose(
        self, draft: DraftPlan, samples: Sequence[SamplingState], compute: Compute
    ) -> list[list[DraftToken]]:
        """`Engine.draft`. Behind a token that the model that is served does not have, or a position that the draft
        model does not have, all proposals have the probability 0."""
        passes = DraftPasses(draft, self._block_size)
        states = [state.of_draft() for state in samples]
        proposed: list[list[DraftToken]] = [[] for _ in states]
        tokens: list[int] = []
        for number in range(draft.count):
            drawn = self._drawn(compute(passes.plan(number, tokens), states), states)
            if drawn is None:
                return [[*row, *[_UNKNOWN] * (draft.count - len(row))] for row in proposed]
            for row, position, token in zip(proposed, passes.positions.tolist(), drawn, strict=True):
                known = token.token < self._vocab_size and position + number < self._context_length
                row.append(token if known and (not row or row[-1].probability) else _UNKNOWN)
            tokens = [row[-1].token for row in proposed]
            states = [state.later() for state in states]
        return proposed

    def _drawn(self, logits: Tensor | RowLogits, states: Sequence[SamplingState]) -> list[DraftToken] | None:
        """None where the draft model computes what is no number."""
        try:
            found = self._sampler.sample(logits, states)
        except BadLogits as error:
            log.warning("draft_model_not_finite", rows=len(error.rows))
            return None
        return [DraftToken(one.token, math.exp(one.logprobs.logprob)) for one in found if one.logprobs]


# --- loading -------------------------------------------------------------------------------------


class DraftShare(NamedTuple):
    """One rank's weights of a draft model, or why there are none."""

    share: Share | None = None
    reason: str = ""
    """One sentence; empty: no draft model was asked for."""

    @property
    def states(self) -> LayerStates:
        return () if self.share is None else self.share.facts.states

    @property
    def imports(self) -> list[str]:
        """See `Share.imports`."""
        return [] if self.share is None else self.share.imports

    def beside(
        self, target: ModelRunner, store: KvStore, spill: Spill, collectives: Collectives
    ) -> DraftModel | None:
        """Has it compute beside `target`, in the last page layers of `store`, whose blocks are copied whole from then
        on. To be called once; None: there is no draft model."""
        if self.share is None:
            return None
        count = len(page_layers(self.states))
        own = store.part(store.shape.num_layers - count, count)
        draft = DraftModel(self.share, self.share.runner(own, spill, None, target))
        draft.runner.warm_up()
        target.add_draft(draft, BlockCopier(store, spill, collectives))
        return draft


class _NoRoom(ConfigurationError):
    pass


def load_draft(
    settings: ExecutorSettings,
    spec: RankSpec,
    directory: Path,
    device: torch.device,
    collectives: Collectives,
    target: Share,
    context: int,
) -> DraftShare:
    """Reads the draft model in `directory` beside `target`, which serves sequences of `context` tokens. Where some rank
    has no room for both, all ranks do without. Raises `ModelLoadError` and `ConfigurationError`."""
    _check_states(target.facts.states, "model")
    room = partial(_check_room, settings, target, context, device)
    own = settings.model_copy(
        update={
            "model": settings.draft_model,
            "dtype": _DTYPES[target.dtype],
            "context_length": 0,
            "kv_dtype_layers": "",
            "weights_memory": 0,
        }
    )
    share, reason = None, ""
    try:
        share = load_share(own, spec, directory, device, collectives, lambda done, total: None, room)
        room(share.facts.states, target.dtype, share.facts.context_length, None, 0)
    except _NoRoom as error:
        share, reason = None, error.message
    if not smallest((int(share is not None),), device, collectives)[0]:
        reason = reason or "Another rank has no room for it."
        log.warning("draft_model_left_out", draft_model=settings.draft_model, reason=reason)
        return DraftShare(None, reason)
    assert share is not None, "all ranks have it"
    longest = share.facts.context_length
    log.info(
        "draft_model_loaded",
        draft_model=settings.draft_model,
        context_length=longest,
        up_to=min(longest, context),
    )
    return DraftShare(share)


def _check_room(
    settings: ExecutorSettings,
    target: Share,
    context: int,
    device: torch.device,
    states: LayerStates,
    dtype: torch.dtype,
    own_context: int,
    widths: StepWidths | None,
    weights: int,
) -> None:
    """`Enough` of a draft model, beside `target`, whose weights are there and which serves `context` tokens."""
    _check_states(states, "draft model")
    facts = target.facts
    try:
        check_room(settings, facts.states, target.dtype, context, device, weights, target.widths, states)
    except ConfigurationError as error:
        raise _NoRoom(error.message) from None


def _check_states(states: LayerStates, which: str) -> None:
    """Raises `ModelLoadError` where drafts could not be taken back."""
    if any(state.slot for state in states):
        raise ModelLoadError(
            f"The {which} has layers that keep a state of each sequence beside the KV cache, which drafts cannot be "
            "taken back from; leave out --draft-model."
        )


# --- what fits to what ---------------------------------------------------------------------------


def draft_directory(settings: ExecutorSettings, target: Path) -> Path | None:
    """Of the draft model for the model in `target`; None: none is asked for, or no drafts at all. Raises
    `ModelLoadError` where they do not fit together, or it is not to be had."""
    if not settings.draft_model or not settings.max_drafts:
        return None
    directory = resolve_model(settings.draft_model, settings.store, lambda *step: None)
    hold_model(directory, settings.model_cache)  # as long as this process lives
    for which, where in (("model", target), ("draft model", directory)):
        described = read_json(where / "config.json")
        if is_encoder(described) or is_classifier(described):
            raise ModelLoadError(
                f"The {which} in {where} gives no tokens one by one; leave out --draft-model."
            )
    if problem := vocabulary_problem(target, directory):
        raise ModelLoadError(
            f"The draft model {settings.draft_model} has another vocabulary: {problem}; {_LEAVE_OUT}"
        )
    sizes = [_weight_bytes(where) for where in (target, directory)]
    if sizes[1] >= sizes[0]:
        log.warning(
            "draft_model_not_smaller", draft_model=settings.draft_model, bytes=sizes[1], model_bytes=sizes[0]
        )
    return directory


def draft_name(settings: ExecutorSettings) -> str:
    """What people call it: the last part of a path, or the hub name; empty: none is asked for, or no drafts at all."""
    name = settings.draft_model if settings.max_drafts else ""
    return (
        Path(name).name.removesuffix(".gguf") if name.startswith(("/", "~", ".")) else name.removeprefix(HUB)
    )


def _weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.suffix in _WEIGHTS)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: Any = {}
    """{token: id}, or [[token, score]]."""


class _TokenizerFile(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def vocabulary_problem(target: Path, draft: Path) -> str:
    """How the tokenizers of two models differ, as half a sentence; empty: every token that both have is the same in
    both. Raises `ModelLoadError` where one has none."""
    files = [_read(directory / "tokenizer.json") for directory in (target, draft)]
    if files[0] == files[1]:
        return ""
    ours, theirs = (_tokens(content, where) for content, where in zip(files, (target, draft), strict=True))
    others = [token for token in sorted(ours.keys() & theirs.keys()) if ours[token] != theirs[token]]
    found = [
        f"token {token} is {_short(theirs[token])} and not {_short(ours[token])}" for token in others[:_NAMED]
    ]
    if len(others) > _NAMED:
        found.append(f"{len(others) - _NAMED} more are others")
    if len(ours.keys() ^ theirs.keys()) > MOST_UNSHARED:
        found.insert(0, f"it has {len(theirs)} tokens and not {len(ours)}")
    return ", ".join(found)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(
            f"The file {path}, by which vocabularies are compared, cannot be read ({error.strerror}); {_LEAVE_OUT}"
        ) from None


def _tokens(content: bytes, directory: Path) -> dict[int, str]:
    """By id."""
    try:
        found = msgspec.json.decode(content, type=_TokenizerFile)
        return dict(_pairs(found))
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"The file {directory / 'tokenizer.json'} is no tokenizer of the tokenizers library ({error}); fetch the "
            "model again."
        ) from None


def _pairs(file: _TokenizerFile) -> Iterator[tuple[int, str]]:
    vocab = file.model.vocab
    if isinstance(vocab, dict):
        yield from ((number, token) for token, number in vocab.items())
    else:
        yield from ((number, token) for number, (token, _) in enumerate(vocab))
    yield from ((token.id, token.content) for token in file.added_tokens)


def _short(token: str) -> str:
    return repr(token if len(token) <= 24 else f"{token[:24]}…")
