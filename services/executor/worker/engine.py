"""The real engine: a tensor-parallel ring of ranks over torch.

leader   plan ──▶ plan channel ──▶ followers
         forward ◀── collectives ──▶ forward
         logits ──▶ sampler ──▶ tokens
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
from msgspec import structs
from torch import Tensor

from services.executor.collectives.base import Collectives
from services.executor.core import spans
from services.executor.core.engine import (
    DraftPlan,
    DraftToken,
    EngineSpec,
    Launched,
    PendingTokens,
    ProgressCallback,
    SampledToken,
    SpilledBlock,
)
from services.executor.core.layer_state import LayerStates, choosing_pages, described
from services.executor.core.prompt_results import Floats, PromptTokenScores
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import ExecutorSettings, thread_count
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.board import RankBoard, RingBoard
from services.executor.ipc.plan_channel import PlanReceiver, PlanSender
from services.executor.ipc.rank_pipe import RankSpec, Rendezvous
from services.executor.kv_cache.offload import DiskSlots
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.kv_transfer.board import HandoverBoard
from services.executor.kv_transfer.endpoint import RankEndpoint
from services.executor.model.card import encoder_config, read_card
from services.executor.model.dtypes import agree_on_bf16
from services.executor.model.loading.checkpoints import model_directory
from services.executor.model.loading.gguf_errors import told_of_file
from services.executor.model.pooling import is_classifier, read_vectors
from services.executor.model.tokenizer_files import check_templates, read_json
from services.executor.native.library import ARITHMETIC
from services.executor.platforms.catalog import choose_device, platform_of
from services.executor.sampling.candidates import RowLogits
from services.executor.sampling.sampler import Sampler, wants_of
from services.executor.worker import rendezvous as meeting
from services.executor.worker.backends.catalog import backend_of, load_share
from services.executor.worker.drafting.kind import Directories
from services.executor.worker.drafting.loading import draft_directory, draft_name, load_draft
from services.executor.worker.drafting.model import DraftModel, DraftSampler
from services.executor.worker.launches import Launches, Result
from services.executor.worker.rendezvous import recorded
from services.executor.worker.runner import ModelRunner
from services.executor.worker.storage import RankStorage
from services.executor.worker.weights import Share, ShareRequest, context_of
from shared.errors import ConfigurationError, InternalError
from shared.messages import ModelCard, SparseKind
from shared.models import linked_gguf
from shared.service.logs import adopt_loggers

if TYPE_CHECKING:  # they import Triton, which not every host has, or take their time
    from services.executor.model.adapters.targets import AdapterTarget
    from services.executor.model.loading.output_heads import ClassHead
    from services.executor.worker.encoder import EncoderRunner

log = structlog.get_logger(__name__)

# Seconds in which a rank that ends writes what it has spilled; a disk that takes longer is not waited for.
FLUSH_TIMEOUT = 5.0
IDLE_LOOK = 0.2  # seconds without a plan after which a profiler that is at work is told


class RingEngine:
    """`Engine` of the leader: rank 0 of the ring, and the one that samples."""

    def __init__(
        self, settings: ExecutorSettings, spec: RankSpec, board: RingBoard, announce: Callable[[Rendezvous], None]
    ) -> None:
        self._settings = settings
        self._spec = spec
        self._board = board.rank(0)
        self._totals = board.totals
        self._announce = announce
        self._sampler = Sampler()
        self._sender = PlanSender([])
        self._member: Worker | None = None
        self._directory = Path()
        # What an adapter may change; found out when the first one comes.
        self._adapter_targets: list[AdapterTarget] | None = None
        self._launches = Launches(self._execute)
        self._draft_sampler: DraftSampler | None = None  # None: there is no draft model
        # Seconds of communication before the first step: ranks wait for each other while they load.
        self._said_before = 0.0

    def load(self, progress: ProgressCallback) -> EngineSpec:
        device = choose_device(self._settings, self._spec.rank)
        torch.set_num_threads(thread_count(self._settings))
        self._directory = model_directory(self._settings)
        if not linked_gguf(self._directory):  # which was looked at when its directory was made
            check_templates(self._directory)
        draft = draft_directory(self._settings, self._directory)
        self._sender, collectives = meeting.lead(
            self._settings, self._spec, device, self._directory, self._announce, draft
        )
        where = Directories(self._directory, draft)
        with told_of_file(self._directory):
            self._member = Worker.load(self._settings, self._spec, self._board, where, device, collectives, progress)
        self._sampler = Sampler(self._member.runner.rows)
        self._said_before = self._member.collectives.busy_seconds
        self._board.communicated = lambda: collectives.busy_seconds
        self._draft_sampler = self._member.draft_sampler
        if self._member.engine_spec.overlaps:
            self._launches = Launches(self._execute, self._begin)
        return self._member.engine_spec

    def card(self, model: str) -> tuple[ModelCard, bytes]:
        member = self._loaded
        card = read_card(self._directory, model, member.engine_spec, checked=member.share.is_cached)
        member.keep()
        return card

    def recovered(self) -> list[SpilledBlock]:
        found, self._loaded.recovered = self._loaded.recovered, []
        return found

    def adapter_digest(self, directory: Path) -> str:
        from services.executor.model.adapters.files import inspect_for
        from services.executor.model.adapters.targets import whole_targets
        from services.executor.model.loading.config_file import load_config

        if self._adapter_targets is None:
            served = self._loaded.runner.adapter_modules
            targets = whole_targets(load_config(self._directory))
            self._adapter_targets = [one for one in targets if served is None or one.name in served]
        return inspect_for(directory, self._adapter_targets, self._settings.max_adapter_rank).digest

    def execute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        return self._launches.launch(plan, samples).result()

    def launch(self, plan: StepPlan, samples: Sequence[SamplingState]) -> Launched:
        return self._launches.launch(plan, samples)

    def draft(self, plan: DraftPlan, samples: Sequence[SamplingState]) -> list[list[DraftToken]]:
        if self._draft_sampler is None:
            raise InternalError("This ring has no draft model.")
        try:
            return self._draft_sampler.propose(plan, samples, self._compute)
        finally:
            self._note_progress()
            self._board.end(plan.plan.step + plan.count - 1)

    def _execute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        try:
            logits = self._compute(plan, samples)
            self._note_progress()
            with spans.span("sample"):
                return self._sampler.sample(logits, samples)
        finally:
            self._board.end(plan.step)  # a step that failed is over too: nothing hangs in it

    def _compute(self, plan: StepPlan, samples: Sequence[SamplingState]) -> Tensor | RowLogits:
        """Has all ranks compute a plan, whose rows `samples` draw from."""
        runner = self._loaded.runner
        plan = self._sent(plan, samples, on_device=False)
        logits = self._board.run(plan, partial(runner.forward, plan, self._board.progress))
        assert logits is not None, "rank 0 gets the logits"
        self._board.recorder.computed()
        return logits

    def _begin(self, plan: StepPlan, samples: Sequence[SamplingState]) -> Result | None:
        """Has the devices compute a step and sample its rows; None where they cannot."""
        runner = self._loaded.runner
        suits = not (plan.pools or plan.score_rows or plan.followed) and runner.can_launch(len(samples))
        if not suits or any(state.needs_host for state in samples):
            return None
        try:
            plan = self._sent(plan, samples, on_device=True)
            pending = self._board.run(plan, partial(runner.launch, plan, samples, self._board.progress))
            assert pending is not None, "a restore that fails is told to rank 0"
        except BaseException:
            self._board.end(plan.step)
            raise
        self._board.recorder.computed()  # as far as the host is concerned: the rest is waiting for tokens
        return partial(self._finish, plan.step, pending)

    def _sent(self, plan: StepPlan, samples: Sequence[SamplingState], *, on_device: bool) -> StepPlan:
        """`plan` as all ranks have it now: this one begins it."""
        spans.before_step(plan.step)
        self._board.begin(plan.step)
        wants = wants_of(samples, self._loaded.engine_spec.vocab_size)
        plan = structs.replace(plan, candidates=wants.tobytes(), on_device=on_device)
        with spans.span("send plan"):
            self._sender.send(plan)
        self._board.recorder.sent()
        return plan

    def _finish(self, step: int, pending: PendingTokens) -> list[SampledToken]:
        """Waits for what the devices were given."""
        try:
            with spans.span("wait for tokens"):
                return pending.wait()
        finally:
            self._note_progress()
            self._board.end(step)  # a step that failed is over too: nothing hangs in it

    def _note_progress(self) -> None:
        self._board.progress.tick()
        self._totals.communication_seconds = self._loaded.collectives.busy_seconds - self._said_before

    def pooled(self) -> Floats:
        return self._loaded.pooled

    def scored(self) -> PromptTokenScores:
        return self._loaded.runner.scored

    @property
    def _loaded(self) -> "Worker":
        assert self._member is not None, "the engine has not been loaded"
        return self._member

    def close(self) -> None:
        self._sender.close()
        if self._member is not None:
            self._member.settle()
            self._member.runner.close()
            self._member.collectives.close()
            self._member = None


def follow_ring(settings: ExecutorSettings, spec: RankSpec, board: RingBoard, rendezvous: Rendezvous) -> None:
    """The life of every other rank. Returns when the leader closes the ring."""
    mine = board.rank(spec.rank)
    device = choose_device(settings, spec.rank)
    torch.set_num_threads(thread_count(settings))
    receiver, collectives = meeting.follow(settings, spec, rendezvous, device)
    draft = Path(rendezvous.draft_directory) if rendezvous.draft_directory else None
    where = Directories(Path(rendezvous.model_directory), draft)
    member = Worker.load(settings, spec, mine, where, device, collectives, lambda done, total: None)
    member.keep()
    mine.communicated = lambda: collectives.busy_seconds
    while (plan := _next_plan(receiver)) is not None:
        spans.before_step(plan.step)
        mine.begin(plan.step)
        mine.run(plan, partial(member.runner.forward, plan, mine.progress))
        mine.launched(plan.step)
    receiver.close()
    member.settle()


def _next_plan(receiver: PlanReceiver) -> StepPlan | None:
    while spans.watched() and not receiver.has_news(IDLE_LOOK):
        spans.idle()
    return receiver.receive()


class LoadTimings:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def over(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = round(now - self._last, 3)
        self._last = now


@dataclass
class Worker:
    runner: "ModelRunner | EncoderRunner"
    collectives: Collectives
    engine_spec: EngineSpec
    share: Share
    head: "ClassHead | None" = None  # a decoder's, of classes
    draft: DraftModel | None = None
    disk: DiskSlots | None = None  # where KV blocks are spilled to
    recovered: list[SpilledBlock] = field(default_factory=list)  # `Engine.recovered`

    @property
    def pooled(self) -> Floats:
        """`Engine.pooled`"""
        found = self.runner.pooled
        return found if self.head is None else self.head.logits(found)

    @property
    def draft_sampler(self) -> DraftSampler | None:
        """None: there is no draft model."""
        if self.draft is None:
            return None
        spec = self.engine_spec
        translation, rows = self.draft.translation, self.runner.rows
        return DraftSampler(spec.vocab_size, self.draft.context_length, spec.block_size, translation, rows)

    def keep(self) -> None:
        """`Share.keep`, of all models."""
        self.share.keep(self.runner.packed)
        if self.draft is not None:
            self.draft.share.keep(self.draft.runner.packed)

    def settle(self) -> None:
        """`Share.settle`, of all models; and what was spilled is written."""
        self.share.settle()
        if self.draft is not None:
            self.draft.share.settle()
        if self.disk is not None:
            self.disk.flush(FLUSH_TIMEOUT)

    @classmethod
    def load(
        cls,
        settings: ExecutorSettings,
        spec: RankSpec,
        board: RankBoard,
        where: Directories,
        device: torch.device,
        collectives: Collectives,
        progress: ProgressCallback,
    ) -> "Worker":
        """Reads this rank's weights and makes its KV store; all ranks end up with equally many blocks."""
        backend = backend_of(device)
        _check_mapped(settings, backend.disk_rate is not None)
        laps, directory = LoadTimings(), where.model
        adopt_loggers()  # of torch, which is loaded by now
        platform_of(device).start_rank(settings, device, board)
        laps.over("kernels")
        collectives = recorded(collectives, board.recorder)
        agree_on_bf16(device, collectives)

        def report(done: int, total: int) -> None:
            board.loaded(done, total)
            progress(done, total)

        if (config := encoder_config(directory)) is not None:
            from services.executor.worker.encoder import load_encoder_rank

            place = (config, directory, device, collectives, report)
            _check_sparse(settings, ())
            encoder, engine_spec = load_encoder_rank(settings, *place)
            laps.over("weights")
            log.info("rank_loaded", cached=False, kv_bytes=0, **laps.seconds)
            return cls(encoder, collectives, engine_spec, Share())
        share = load_share(ShareRequest(settings, spec, directory, device, collectives, report))
        if backend.packs_weights and share.reads_compressed and not share.is_cached:
            board.packs()
        facts = share.facts
        _check_sparse(settings, facts.states)
        _check_mapped(settings, share.reads_compressed)
        context = context_of(settings, facts.context_length, facts.rotary.longest)
        drafting = load_draft(settings, spec, where, device, collectives, share, context)
        laps.over("weights")
        storage = RankStorage.make(settings, share, context, device, collectives, drafting.states)
        laps.over("kv_cache")
        limits = backend.step_limits(settings, context, drafts=drafting.share is not None)
        runner = share.runner(storage.own_store, storage.spill, limits)
        laps.over("packing")
        draft = drafting.beside(runner, storage.store, storage.spill, collectives, limits)
        if settings.max_adapters:
            limits_of_adapters = (settings.max_adapters, settings.max_adapter_rank, settings.adapter_dtype)
            runner.serve_adapters(share.facts.adapter_targets, share.dtype, *limits_of_adapters)
        if runner.is_native:
            spans.count_native(runner.spent)
        compiled = limits if settings.warm_up != "off" else None
        runner.warm_up(backend.rehearsal(share.layout, storage.store, compiled) if compiled else ())
        handover = HandoverBoard.beside(spec.board, spec.world_size)
        if handover is not None:
            address = (spec.rank, settings.ring_host, settings.handover_port)
            size = storage.shape.bytes_per_spilled_block
            runner.connect(RankEndpoint(storage.store.save, size, handover.rank(spec.rank), *address))
        numerics = _numerics(settings, runner, storage.own_store.shape.numerics, facts.made_for)
        models = [model for model in (directory, where.draft) if model is not None]
        recovered = storage.recover(settings, models, numerics, collectives)
        laps.over("warm_up")
        collectives.barrier()
        laps.over("others")
        log.info("rank_loaded", cached=share.is_cached, kv_bytes=storage.store.nbytes, **laps.seconds)
        head, task_facts = _tasks(directory, share.facts.hidden_size)
        engine_spec = EngineSpec(
            settings.block_size,
            storage.blocks.writable,
            context,
            runner.vocab_size,
            kv_format=storage.shape.format if handover is not None else "",
            overlaps=runner.can_launch(1),
            imports=[*dict.fromkeys(share.imports + drafting.imports)],
            numerics=numerics,
            kernels=runner.kernels,
            exact=runner.is_exact,
            sparse=_sparse_kinds(settings, storage.own_store.shape),
            streamed=share.streamed,
            layers=described(share.facts.states),
            max_adapters=settings.max_adapters if runner.takes_adapters else 0,
            drafts=draft is not None,
            draft_reads_states=draft is not None and draft.reads_states,
            draft_model=draft_name(settings),
            draft_left_out=drafting.reason,
            **storage.facts,
            **task_facts,
        )
        return cls(runner, collectives, engine_spec, share, head, draft, storage.spill.disk, recovered)


def _sparse_kinds(settings: ExecutorSettings, shape: StoreShape) -> list[SparseKind]:
    """`EngineSpec.sparse`"""
    if not shape.choosing:
        return []
    return ["pages", "window"] if settings.sparse_attention else ["window"]


def _check_sparse(settings: ExecutorSettings, states: LayerStates) -> None:
    """Raises `ConfigurationError` where page summaries are asked for and would be of no use."""
    if settings.sparse_attention and not choosing_pages(states):
        raise ConfigurationError(
            "No layer of this model attends to all tokens with keys and values of its own, so that --sparse-attention "
            "has nothing to choose from; leave it out."
        )


def _check_mapped(settings: ExecutorSettings, computes: bool) -> None:
    """Raises `ConfigurationError` where KV blocks are to lie in a file and what `computes` reads none there."""
    if settings.kv_mapped_memory and not (computes and hasattr(os, "posix_fallocate")):
        raise ConfigurationError(
            "--kv-mapped-memory is for models that the native CPU kernels compute, on Linux (docs/performance.md); "
            "leave it out."
        )


def _tasks(directory: Path, hidden_size: int) -> "tuple[ClassHead | None, dict[str, Any]]":
    """What the decoder in `directory` does beside generating, or in its place: its classification head, and fields of
    an `EngineSpec`. Raises `ModelLoadError`."""
    described = read_json(directory / "config.json")
    embeds, in_gguf = (directory / "modules.json").is_file(), bool(linked_gguf(directory))
    generates, head = True, None
    if in_gguf:
        # A file without a head may be of a model that has one in the embedding, or none: where it embeds, the latter.
        generates = not embeds or not described.get("tie_word_embeddings")
    if is_classifier(described) or (embeds and not in_gguf):
        # With transformers, which takes seconds.
        from services.executor.model.loading.config_file import load_config
        from services.executor.model.loading.output_heads import has_output_layer, read_class_head
        from services.executor.model.loading.weight_files import WeightFiles

        config = load_config(directory)
        head = read_class_head(directory, config)
        if head is None:
            with WeightFiles(directory) as files:
                generates = has_output_layer(directory, config, files.shapes)
    if head is not None:
        classes = {"labels": head.labels, "activation": head.activation}
        return head, {"pooling": "last", "generates": False, **classes}
    vectors = read_vectors(directory)
    size = {"embedding_size": hidden_size, "normalized": vectors.normalized}
    return None, {"pooling": vectors.pooling, "generates": generates, **size}


def _numerics(settings: ExecutorSettings, runner: ModelRunner, kv_format: str, rotary: str) -> str:
    """What the bits of results depend on, beside the model's files. `rotary`: `ModelFacts.made_for`."""
    adapters = "" if settings.adapter_dtype == "auto" else f"adapters-{settings.adapter_dtype}"
    arithmetic = f"arithmetic-{ARITHMETIC}" if runner.is_native else ""
    return " ".join(part for part in (runner.kernels, arithmetic, kv_format, adapters, rotary) if part)
