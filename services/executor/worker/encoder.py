"""A rank that computes an encoder: each step whole texts, nothing of which is kept.

    step plan ─▶ flat batch of texts ─▶ states ─▶ of each text: pooled state, or its classes' logits

Block ids are handed out as for any model, since the scheduler counts with them; there is no memory behind them.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from services.executor.collectives.base import Collectives
from services.executor.core.engine import EngineSpec, PendingTokens
from services.executor.core.progress import ProgressCounter
from services.executor.core.prompt_results import Floats, PromptTokenScores, no_scores
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import ExecutorSettings
from services.executor.core.spans import span
from services.executor.core.step_plan import StepPlan, as_int32, to_bytes
from services.executor.model.dtypes import choose_dtype, not_finite
from services.executor.model.encoders.attention import Texts
from services.executor.model.encoders.families import EncoderFamily, family_of, most_tokens_of
from services.executor.model.encoders.loading import Encoder, load_dense, load_encoder
from services.executor.model.pooling import (
    VectorFacts,
    activation_of,
    is_classifier,
    labels_of,
    most_tokens,
    read_vectors,
)
from services.executor.sampling.sampler import TorchKernels
from services.executor.worker.weights import Report, context_of
from shared.errors import ConfigurationError

log = structlog.get_logger(__name__)


class EncoderRunner:
    """Runs step plans on one rank's share of an encoder, in the place of a `ModelRunner`."""

    adapter_modules: set[str] | None = set()
    packed = None  # nothing that a later start could read in place of the checkpoint

    def __init__(
        self, encoder: Encoder, vectors: VectorFacts | None, collectives: Collectives, device: torch.device
    ) -> None:
        """`vectors`: how it embeds; None: it classifies."""
        self._base, self._model, self._dense = encoder.base, encoder.model, encoder.dense
        self._vectors = vectors
        self._collectives = collectives
        self._device = device
        config = self._base.config
        self.vocab_size = int(config.vocab_size)
        self.kernels = f"PyTorch {device.type}"
        self._family: EncoderFamily = family_of(config)
        names = inspect.signature(self._base.forward).parameters
        self._segments = int(getattr(config, "type_vocab_size", 0) or 0) if "token_type_ids" in names else 0
        self._options: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
        self._tick: Callable[[], None] = ProgressCounter.unread().tick
        for module in self._base.modules():
            if not list(module.children()) and list(module.parameters()):
                module.register_forward_hook(self._progressed)
        self._given = _Given(self._base)
        if vectors is None:
            name = next(name for name, module in self._model.named_children() if module is self._base)
            setattr(self._model, name, self._given)
        # What the last step has pooled, on rank 0: float32 [P, size]; or the logits of classes [P, labels].
        self.pooled: Floats = np.zeros((0, 0), np.float32)
        self.scored: PromptTokenScores = no_scores()
        self.rows = TorchKernels()  # nothing is drawn

    def can_launch(self, rows: int) -> bool:
        """Steps are waited for."""
        return False

    def launch(
        self, plan: StepPlan, states: Sequence[SamplingState] | None, progress: ProgressCounter
    ) -> PendingTokens | None:
        raise NotImplementedError("steps of an encoder are waited for")

    def close(self) -> None:
        """Nothing is held but memory."""

    @torch.inference_mode()
    def forward(self, plan: StepPlan, progress: ProgressCounter | None = None) -> Tensor | None:
        """Computes the step; `progress` counts modules. No logits of tokens on rank 0, None on the others."""
        self._tick = (progress or ProgressCounter.unread()).tick
        leads = self._collectives.rank == 0
        if plan.token_ids:
            lengths = as_int32(plan.query_lens).tolist()
            with span("compute"):
                states = self._states(plan, lengths)
                pools = as_int32(plan.pools).reshape(-1, 2).tolist() if leads else []
                self.pooled = self._pooled(states, pools)
        return torch.empty((0, self.vocab_size)) if leads else None

    def warm_up(self) -> None:
        """Computes a text of two tokens: what cannot run fails here. Raises `ModelLoadError`, also when the weights
        compute what is no number."""
        two = to_bytes([0, 1])
        length = to_bytes([2])
        pools = to_bytes([0, 2])
        self.forward(StepPlan(0, 0, to_bytes([0, 0]), two, two, length, length, b"", b"", pools=pools))
        if not np.isfinite(self.pooled).all():
            raise not_finite()

    def _states(self, plan: StepPlan, lengths: list[int]) -> Tensor:
        """[T, hidden]: of each token behind the last layer."""
        tokens = self._int64(plan.token_ids)
        positions = self._int64(plan.positions) + self._family.first_position
        segments = self._segments_of(plan, lengths)
        if self._family.is_flat:
            return self._run(tokens[None], positions[None], segments, texts=Texts(lengths, self._tick))[0]
        states: list[Tensor] = [tokens] * len(lengths)
        starts = np.cumsum(lengths) - lengths
        for length in sorted(set(lengths)):  # one batch of each, without padding
            texts = [at for at, own in enumerate(lengths) if own == length]
            rows = torch.from_numpy(starts[texts][:, None] + np.arange(length)).to(self._device)
            within = None if segments is None else segments[0][rows]
            found = self._run(tokens[rows], positions[rows], within)
            for text, state in zip(texts, found, strict=True):
                states[text] = state
        return torch.cat(states)

    def _run(self, tokens: Tensor, positions: Tensor, segments: Tensor | None, **options: Any) -> Tensor:
        if segments is not None:
            options["token_type_ids"] = segments
        given = {"input_ids": tokens, "position_ids": positions, **self._options, **options}
        states: Tensor = self._base(**given).last_hidden_state
        return states

    def _segments_of(self, plan: StepPlan, lengths: list[int]) -> Tensor | None:
        """int64 [1, T]; None where the model tells none apart."""
        if not self._segments:
            return None
        segments = torch.zeros(sum(lengths), dtype=torch.int64)
        if self._segments > 1:
            begins = as_int32(plan.second_segments).tolist()
            first = 0
            for length, begin in zip(lengths, begins, strict=False):
                if begin:
                    segments[first + begin : first + length] = 1
                first += length
        return segments[None].to(self._device)

    def _pooled(self, states: Tensor, pools: list[list[int]]) -> Floats:
        """float32 [P, size]: of the texts in the rows [first, end)."""
        if not pools:
            return np.zeros((0, 0), np.float32)
        texts = [states[first:end] for first, end in pools]
        if self._vectors is None:
            found = torch.cat([self._classes(text) for text in texts])
        else:
            found = torch.stack([_pool(text, self._vectors.pooling) for text in texts])
            if self._dense is not None:
                found = self._dense(found.to(states.dtype))
        return found.float().cpu().numpy()

    def _classes(self, states: Tensor) -> Tensor:
        """[1, labels]: the model's own code behind its encoder, on the `states` of one text."""
        self._given.states = states[None]
        ids = torch.zeros((1, len(states)), dtype=torch.int64, device=states.device)
        logits: Tensor = self._model(input_ids=ids).logits
        return logits

    def _progressed(self, module: nn.Module, args: object, output: object) -> None:
        self._tick()

    def _int64(self, payload: bytes) -> Tensor:
        return torch.from_numpy(as_int32(payload).astype(np.int64)).to(self._device)


class _Given(nn.Module):
    """Takes an encoder's place in its model: gives states that it has computed."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._pooler: Any = getattr(base, "pooler", None)
        # ALBERT's, whose pooler is a linear layer.
        self._activation: Any = getattr(base, "pooler_activation", None)
        self.states = torch.empty(0)

    def forward(self, *args: Any, **options: Any) -> BaseModelOutputWithPooling:
        pooled = None
        if self._activation is not None:
            pooled = self._activation(self._pooler(self.states[:, 0]))
        elif self._pooler is not None:
            pooled = self._pooler(self.states)
        return BaseModelOutputWithPooling(last_hidden_state=self.states, pooler_output=pooled)


def _pool(states: Tensor, pooling: str) -> Tensor:
    """float32 [hidden]"""
    if pooling == "mean":
        return states.float().mean(dim=0)
    return states[0 if pooling == "cls" else -1].float()


def load_encoder_rank(
    settings: ExecutorSettings,
    config: Any,
    directory: Path,
    device: torch.device,
    collectives: Collectives,
    report: Report,
) -> tuple[EncoderRunner, EngineSpec]:
    """A rank's share of the encoder in `directory`, of this configuration, ready to run. Raises `ModelLoadError` and
    `ConfigurationError`: one sentence with the remedy."""
    if settings.weight_dtype != "auto":
        raise ConfigurationError(
            f"--weight-dtype is {settings.weight_dtype}, and encoders' weights are not quantized; leave it at auto."
        )
    if settings.weights_memory:
        raise ConfigurationError(
            "--weights-memory is for models that the native CPU kernels compute, and not for encoders; leave it out."
        )
    classifies = is_classifier(config.to_dict())
    vectors = None if classifies else read_vectors(directory, default="mean", dense=True)
    labels = labels_of(config) if classifies else []
    activation = activation_of(config) if classifies else ""
    context = _context(settings, config, directory)
    dtype = choose_dtype(settings, device, config, collectives, by_kernels=False)
    encoder = load_encoder(directory, config, dtype, collectives, device, report, classifies=classifies)
    size = int(config.hidden_size)
    if vectors is not None and vectors.dense:
        encoder = encoder._replace(dense=load_dense(vectors.dense, size, dtype, device))
        size = vectors.dense[-1].outputs
    runner = EncoderRunner(encoder, vectors, collectives, device)
    runner.warm_up()
    collectives.barrier()
    blocks = -(-context // settings.block_size) * settings.max_sequences
    return runner, EngineSpec(
        settings.block_size,
        blocks,
        context,
        runner.vocab_size,
        pooling="" if vectors is None else vectors.pooling,
        embedding_size=0 if vectors is None else size,
        imports=["services.executor.worker.encoder", type(encoder.base).__module__],
        numerics=f"{runner.kernels} {dtype}",
        kernels=runner.kernels,
        layers="an encoder: nothing is kept",
        generates=False,
        labels=labels,
        activation=activation,
        normalized=vectors is None or vectors.normalized,
        whole_prompts=True,
    )


def _context(settings: ExecutorSettings, config: Any, directory: Path) -> int:
    """Tokens of the longest text: as sentence-transformers cuts it where its files say, else what the model takes."""
    longest = most_tokens_of(config)
    named = min(most_tokens(directory) or longest, longest)
    return context_of(settings, longest) if settings.context_length else named
