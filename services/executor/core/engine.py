"""What the leader asks of an engine, whichever engine it is.

Life cycle: built with its settings → `load()` once → `execute()`, or `launch()` and `result()`, any number of
times, always from the same thread → `close()` once. The real engine runs a tensor-parallel ring; the stub
computes nothing at a set speed. The leader cannot tell them apart.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from services.executor.core.prompt_results import Floats, PromptTokenScores
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan
from shared.errors import InternalError, InvalidGrammar
from shared.messages import EngineTraits, GroupTraits, ModelCard, SparseKind, StreamedWeights, TokenLogprobs

ProgressCallback = Callable[[int, int], None]  # called while loading with (bytes done, bytes in all)


class EngineSpec(msgspec.Struct, frozen=True):
    """What a loaded engine can hold: the numbers that the leader plans with."""

    block_size: int  # tokens per KV block
    num_blocks: int  # KV blocks that can be written to, the same on every rank
    context_length: int  # most tokens (prompt and output) that one sequence may have
    vocab_size: int
    num_quantized: int = 0  # KV blocks for compressed, full blocks; their ids follow the writable ones'
    num_host: int = 0  # spill slots in host memory
    num_disk: int = 0  # spill slots on disk; their numbers follow those in host memory
    copies_per_step: int = 32  # blocks that a step restores at most
    pooling: str = ""  # how a prompt becomes a vector (`model/card.py`); empty: it does not
    embedding_size: int = 0  # numbers in such a vector
    # What a full block's bytes mean: rings of one format can give blocks to each other; empty: there are none.
    kv_format: str = ""
    kv_block_bytes: int = 0  # of one full block on this rank
    # Most bytes of memory that this rank's KV cache takes once all of it was written to; of blocks in a file, what
    # must be there of them at once.
    kv_bytes: int = 0
    # Whether it computes what was launched while its thread goes on, so that it pays to launch a step before the
    # one before it is over.
    overlaps: bool = False
    # Modules that the next start of a rank of this model will need beyond those that every rank has.
    imports: list[str] = []
    # What computes, as far as the bits of its results depend on it; part of the model's fingerprint.
    numerics: str = ""
    kernels: str = ""  # what computes, for people: `native avx2`, `PyTorch cpu`
    # Whether what a position comes to depends on the tokens up to it alone, to the bit, however its step is cut.
    exact: bool = False
    # Slots for recurrent state, of running sequences and of snapshots that are being made; 0: the model keeps none.
    num_states: int = 0
    # Further slots, for the states behind the positions that check drafts: one for each draft of a step.
    draft_states: int = 0
    # Full blocks that a snapshot of such a state takes, on the rank where it is the largest.
    state_blocks: int = 0
    layers: str = ""  # what the model's layers keep on this rank, for people
    max_adapters: int = 0  # slots for LoRA adapters on each rank; 0: it computes none
    generates: bool = True  # whether it gives tokens
    # Of a classifier, in the order of its logits; empty: it is none. What the engine pools begins with them then.
    labels: list[str] = []
    activation: str = ""  # `ModelCard.activation`
    normalized: bool = True  # whether vectors are brought to length 1
    # Whether every token of a prompt is seen by all others: prompts are computed in one step each, nothing of them is
    # kept, and the engine pools them itself.
    whole_prompts: bool = False
    drafts: bool = False  # whether it has a draft model (`Engine.draft`)
    # Whether that reads hidden states of the model that is served: what it has computed behind its own proposals is
    # better computed again.
    draft_reads_states: bool = False
    draft_model: str = ""  # what people call it, also where it was left out; empty: none is asked for
    draft_left_out: str = ""  # why it serves without one that is asked for: one sentence

    # Kinds of sparse attention that it computes (`SparseAttention.kind`); empty: none.
    sparse: list[SparseKind] = []
    streamed: StreamedWeights | None = None  # of this rank; None: all of its weights are in memory

    @property
    def tasks(self) -> list[str]:
        """`ModelCard.tasks`"""
        does = {
            "generate": self.generates,
            "embed": bool(self.pooling and self.embedding_size),
            "classify": bool(self.labels),
        }
        return [task for task, it_does in does.items() if it_does]

    @property
    def total_blocks(self) -> int:
        return self.num_blocks + self.num_quantized

    @property
    def full_blocks(self) -> int:
        """KV blocks for full ones: the quantized ones, or all where nothing is compressed."""
        return self.num_quantized or self.num_blocks

    @property
    def capacity(self) -> int:
        """Tokens that the whole KV cache holds of one sequence: where full blocks are compressed, one more is being
        filled."""
        return self.full_blocks * self.block_size + (self.block_size - 1 if self.num_quantized else 0)


def with_tasks(card: ModelCard, spec: EngineSpec) -> ModelCard:
    """`card` with what the model of `spec` does."""
    return msgspec.structs.replace(
        card,
        embedding_size=spec.embedding_size if spec.pooling else 0,
        tasks=spec.tasks,
        pooling=spec.pooling,
        normalized=spec.normalized,
        bidirectional=spec.whole_prompts,
        labels=spec.labels,
        activation=spec.activation,
        draft_model=spec.draft_model,
        draft_left_out=spec.draft_left_out,
        sparse=spec.sparse,
        page_tokens=spec.block_size,
    )


RING = EngineTraits("ring")


def traits_of(spec: EngineSpec, engine: EngineTraits = RING) -> GroupTraits:
    """What a group with the model of `spec` tells of itself."""
    return GroupTraits(spec.sparse, spec.draft_model, spec.draft_left_out, engine)


class SampledToken(msgspec.Struct, frozen=True):
    """The token chosen for one row of a step, with its log probabilities where asked for."""

    token: int
    logprobs: TokenLogprobs | None = None


class DraftPlan(msgspec.Struct, frozen=True):
    """What the draft model is to propose: `count` tokens behind the last one of each sequence.

    first pass     the last token -> d1       in the slots of `plan`
    pass k + 1     dk -> d(k + 1)             in column k - 1 of `slots`, until there are `count`
    """

    # `of_draft`: of each sequence the tokens that the draft model has not computed yet, mostly the last one alone,
    # which is sampled. `context_lens`, and so `block_tables`, cover the `count` proposals too. It may have `saves`.
    # Its `step` is the number of the first pass; the others follow.
    plan: StepPlan
    count: int  # tokens to propose, at least 1
    slots: bytes  # int32 [S, count - 1]: where the proposals go; the last one is not computed


class DraftToken(NamedTuple):
    """A proposal of the draft model."""

    token: int
    probability: float  # that the draft model gives it, before temperature and filters


class BadLogits(InternalError):
    """Some rows of logits are not numbers. `rows` are their indices."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(f"The model's logits of rows {rows} are NaN or infinite; check the weights and the data type.")
        self.rows = rows


class GrammarFailed(InvalidGrammar):
    """Some rows' grammars can be followed no further. `rows` are their indices."""

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class RestoreFailed(InternalError):
    """Some spilled blocks cannot be read. What ranks have computed of the step is of no use; its copies are made, but
    for the restores of `slots`, and state loads, which need not be: the next plan has them again."""

    def __init__(self, slots: list[int]) -> None:
        super().__init__(
            f"The spilled KV blocks in slots {slots} cannot be read; their contents will be recomputed. If it "
            "happens again, check the disk that --kv-disk-directory names."
        )
        self.slots = slots


class SpilledBlock(NamedTuple):
    """A block that a ring has on disk when it starts."""

    slot: int
    key: tuple[bytes, bytes, bytes]  # digest, parent, tokens (`kv_cache/prefix_index.py`)


class PendingTokens(Protocol):
    """Tokens of a step that a device computes and samples."""

    def wait(self) -> list[SampledToken]:
        """One per row, once the device has come to them. Raises `BadLogits`."""
        ...


class Launched(Protocol):
    def result(self) -> list[SampledToken]:
        """Waits for it; what `Engine.execute` gives, and raises. To be called once for every step, in the order in
        which they were launched."""
        ...


class Engine(Protocol):
    """Computes steps. Knows nothing of requests, queues or the network to the clients."""

    def load(self, progress: ProgressCallback) -> EngineSpec:
        """Brings the model into memory. Raises `shared.errors.ModelLoadError` with the remedy."""
        ...

    def recovered(self) -> list[SpilledBlock]:
        """What all ranks have on disk from before they started, in the order of writing. To be asked once, after
        `load`."""
        ...

    def card(self, model: str) -> tuple[ModelCard, bytes]:
        """What gateways are told of the loaded model, which clients call `model`: its card, and its
        tokenizer's files as an encoded `TokenizerBundle` (empty: none). Raises `ModelLoadError`."""
        ...

    def execute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        """Runs one step and samples one token per row of `plan.sample_rows`, in their order.

        Raises `BadLogits` when some rows are not numbers, `GrammarFailed` when no token may follow in some,
        `RestoreFailed` when a spilled block cannot be
        read, and `shared.errors.RingLost` when a rank is gone; the engine is of no more use then.
        """
        ...

    def launch(self, plan: StepPlan, samples: Sequence[SamplingState]) -> Launched:
        """Begins a step, behind one at most whose result was not asked for yet. Steps are executed in the order of
        their launches.

        A token id of -1 - k stands for the token that row k (of `sample_rows`) of the step launched before samples.
        Where that step fails, this one is executed all the same, with any valid tokens: its copies count, its
        result does not, and may be any of `execute`'s errors.
        """
        ...

    def draft(self, plan: DraftPlan, samples: Sequence[SamplingState]) -> list[list[DraftToken]]:
        """`plan.count` proposals for each sequence, in their order. Only with `EngineSpec.drafts`, and while no step
        is under way.

        They are drawn by (seed, position) as the model that is served draws, without grammars, edits of logits and
        log probabilities; `samples` stay as they are. Raises `shared.errors.RingLost` when a rank is gone.
        """
        ...

    def pooled(self) -> Floats:
        """Of the last step whose result was asked for: for each of `plan.pools` the sum of its rows' final hidden
        states, float32 [P, hidden]; with `EngineSpec.labels` their logits [P, labels]; with `whole_prompts` the
        pooled state, and not a sum."""
        ...

    def scored(self) -> PromptTokenScores:
        """Of the last step whose result was asked for: what `plan.score_rows` give, with `plan.score_top` of the most
        likely tokens each."""
        ...

    def adapter_digest(self, directory: Path) -> str:
        """Of the LoRA adapter whose files are in `directory`, once it has been checked against the loaded model. From
        any thread. Raises `shared.errors.ModelLoadError`, one sentence, where it cannot be computed."""
        ...

    def close(self) -> None:
        """Frees everything. Safe to call twice, and after a failure."""
        ...
