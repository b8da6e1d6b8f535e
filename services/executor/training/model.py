"""The model that a job trains: a frozen base, low-rank factors beside its linears, and log probabilities.

    batch ──▶ embedding ──▶ layers, one at a time ──▶ norm ──trained rows──▶ output layer in blocks ──▶ log p(target)
                               │ of each its input is kept, all else is computed again for the gradients;
                               │ of some more is kept, as far as KEPT_ACTIVATIONS reach
                               └ before each, forward and backward: `between_layers`

The modules are transformers', as serving builds them, so that a model trains as it is served.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.trainer_pipe import KEPT_ACTIVATIONS
from services.executor.model.adapters.targets import AdapterTarget
from services.executor.model.parallel.layers import LinearShard, VocabParallelEmbedding, VocabParallelHead, piece_of
from services.executor.training.base.attention import ATTENTION_NAME, CURRENT_ATTRIBUTE, register_training_attention
from services.executor.training.base.linear import Factors, FrozenLinear, Pass
from services.executor.training.base.loading import LoadedBase, load_base
from services.executor.training.base.log_probs import Head
from services.executor.training.base.weights import Scratch
from services.executor.training.batch import DropoutKey, PackedBatch
from shared.errors import InvalidRequest, ModelLoadError
from shared.messages.training import Hyperparameters

log = structlog.get_logger(__name__)

# What a layer keeps from forward to backward, against the inputs and outputs of its linears. How many layers keep it
# changes memory and time, and no bit of a result.
_KEPT_SHARE = 1.25


class TrainableModel:
    """One thread at a time. `factors` are the parameters that an optimizer changes."""

    def __init__(
        self,
        base: LoadedBase,
        hyperparameters: Hyperparameters,
        seed: int,
        between_layers: Callable[[], None],
        collectives: Collectives | None = None,
    ) -> None:
        """Raises `InvalidRequest` where the base has none of the linears that are to be trained."""
        self._model = base.model
        self._between_layers = between_layers
        device = next((held.device for held in base.model.parameters() if held.numel()), torch.device("cpu"))
        self._scratch = Scratch(base.dtype, device)
        self._current = [Pass()]
        self.linears = _freeze_linears(base, self._scratch, self._current)
        self._head = _head_of(base, self._scratch, collectives or SingleRank())
        _look_up(base, self._scratch)
        self._attend()
        self.factors: dict[str, Factors] = {}  # by the linear's name, sorted
        self._add_factors(base, hyperparameters, seed)
        self._layers = _layers_of(self._model)
        self._kept_layers = 0
        # Whoever has quantized the base has little memory.
        self._kept_bytes = KEPT_ACTIVATIONS if base.kind == "checkpoint" else KEPT_ACTIVATIONS // 4
        self._widths = [self._width_of(layer, base.targets) for layer in self._layers]
        for index, layer in enumerate(self._layers):
            layer.forward = self._through(index, layer.forward)
        # For the log.
        self.description = {
            "base": base.kind,
            "dtype": str(base.dtype).removeprefix("torch."),
            "linears": len(self.factors),
            "rank": hyperparameters.rank,
            "trained_bytes": sum(part.nbytes for part in self.parameters),
        }

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All factors' parts, in the order of their names, A before B."""
        return [part for some in self.factors.values() for part in (some.a, some.b)]

    def log_probs(self, batch: PackedBatch, *, adapter: bool, dropout: DropoutKey | None) -> tuple[Tensor, Tensor]:
        """float32 [N] log p(target), with gradients to the factors where they count (`adapter`) and gradients are
        wanted; bool [N] whether no token is likelier. `dropout`: what that of the factors is drawn from; None: none.
        """
        device = self._scratch.device
        tokens = batch.tokens.to(device)
        positions = torch.cat([torch.arange(length, device=device) for length in batch.lengths])
        with self._during(Pass(adapter, dropout, batch.lengths)):
            self._kept_layers = self._how_many_keep(len(tokens))
            states = self._model.base_model(
                input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
            ).last_hidden_state[0]
            self._between_layers()
            return self._head.log_probs(states.index_select(0, batch.rows.to(device)), batch.targets.to(device))

    @contextmanager
    def _during(self, now: Pass) -> Iterator[None]:
        """Also of what is computed again while another pass is under way."""
        before, self._current[0] = self._current[0], now
        try:
            yield
        finally:
            self._current[0] = before

    def _how_many_keep(self, tokens: int) -> int:
        left = self._kept_bytes
        size = self._scratch.dtype.itemsize * tokens * _KEPT_SHARE
        for index, width in enumerate(self._widths):
            left -= int(width * size)
            if left < 0:
                return index
        return len(self._widths)

    def _through(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` of a layer, computed again for its gradients unless it keeps what these need."""

        def once(now: Pass, hidden: Tensor, *rest: Any, **named: Any) -> Any:
            with self._during(now):
                self._between_layers()
                return forward(hidden, *rest, **named)

        def through(hidden: Tensor, *rest: Any, **named: Any) -> Any:
            now = self._current[0]
            if not torch.is_grad_enabled() or not now.adapter:
                return once(now, hidden, *rest, **named)
            if index < self._kept_layers:
                out = once(now, hidden, *rest, **named)
            else:
                out = checkpoint(once, now, hidden, *rest, use_reentrant=False, preserve_rng_state=False, **named)
            first: Tensor = out[0] if isinstance(out, tuple) else out
            if first.requires_grad:
                first.register_hook(lambda gradient: self._between_layers())  # type: ignore[no-untyped-call]
            return out

        return through

    def _width_of(self, layer: nn.Module, targets: list[AdapterTarget]) -> int:
        """Values that the linears of a layer read and write of a token, on all ranks: which must agree on it."""
        own = set(layer.modules())
        names = {name for name, module in self._model.named_modules() if module in own}
        return sum(target.inputs + target.outputs for target in targets if target.name in names)

    def _attend(self) -> None:
        register_training_attention()
        for module in self._model.modules():
            module.__dict__[CURRENT_ATTRIBUTE] = self._current
            if (config := getattr(module, "config", None)) is not None:
                config._attn_implementation = ATTENTION_NAME  # noqa: SLF001  # no public name

    def _add_factors(self, base: LoadedBase, hyperparameters: Hyperparameters, seed: int) -> None:
        device = self._scratch.device
        for target in _chosen(base.targets, self.linears, hyperparameters.targets):
            shape = (target.outputs, target.inputs)
            factors = Factors.drawn(seed, target.name, hyperparameters.rank, shape, device)
            self.linears[target.name].train(target, factors, hyperparameters.scale, hyperparameters.dropout)
            self.factors[target.name] = factors


def load_trainable(
    model_directory: Path,
    settings: ExecutorSettings,
    hyperparameters: Hyperparameters,
    seed: int,
    threads: int,
    device: torch.device,
    between_layers: Callable[[], None],
    compute_dtype: torch.dtype | None = None,
    collectives: Collectives | None = None,
) -> TrainableModel:
    """The model in `model_directory` with factors of `hyperparameters`, drawn from `seed`. `settings`: of the executor
    that serves it; `compute_dtype`: other than these say; `collectives`: of the ranks that train it together, each with
    its share and its part of the gradients.

    Raises `ModelLoadError`: one sentence that says why this base cannot be trained here; `InvalidRequest` for targets
    that it has not.
    """
    ranks = collectives or SingleRank()
    base = load_base(model_directory, settings, device, threads, compute_dtype, ranks)
    made = TrainableModel(base, hyperparameters, seed, between_layers, ranks)
    log.info("training_model_loaded", **made.description)
    return made


def _freeze_linears(base: LoadedBase, scratch: Scratch, current: list[Pass]) -> dict[str, FrozenLinear]:
    """By their names, with the modules computing by them; the output layer is not among them."""
    linears = {}
    for name, module in base.model.named_modules():
        if isinstance(module, LinearShard) and not isinstance(module, VocabParallelHead):
            bias = None if module.bias is None else module.bias.detach()
            linears[name] = FrozenLinear(name, base.weights[name], bias, scratch, current)
            module.multiply_by(linears[name])
    return linears


def _look_up(base: LoadedBase, scratch: Scratch) -> None:
    for name, module in base.model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            weight = base.weights[name]
            module.look_up_by(lambda tokens, weight=weight: weight.picked(tokens, scratch))  # type: ignore[misc]


def _head_of(base: LoadedBase, scratch: Scratch, collectives: Collectives) -> Head:
    config, module = base.model.config, base.model.get_output_embeddings()
    name = next(name for name, one in base.model.named_modules() if one is module)
    scale = 1.0
    if divisor := getattr(config, "logits_scaling", None):
        scale /= float(divisor)
    if factor := getattr(config, "logit_scale", None):
        scale *= float(factor)
    bias = None if module.bias is None else module.bias.detach().float()
    cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    piece = piece_of(module, "weight")
    first = 0 if piece is None else piece.spans[0].start
    return Head(base.weights[name], bias, scale, cap, scratch, first, collectives)


def _layers_of(model: Any) -> list[Any]:
    """The decoder layers, in their order."""
    count = model.config.num_hidden_layers
    for module in model.base_model.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise ModelLoadError(
        f"This model cannot be fine-tuned here, since the layers of {model.config.model_type!r} are not found; choose "
        "a dense model of attention layers, such as Llama, Mistral, Qwen or Gemma."
    )


def _chosen(targets: list[AdapterTarget], linears: dict[str, FrozenLinear], wanted: list[str]) -> list[AdapterTarget]:
    """The linears that are trained, sorted by their names. Raises `InvalidRequest` where one of `wanted` is none."""
    known = sorted((target for target in targets if target.name in linears), key=lambda target: target.name)
    leaves = {target.name.rpartition(".")[2] for target in known}
    if missing := sorted(set(wanted) - leaves):
        raise InvalidRequest(
            f"The model has no linear layers named {', '.join(missing)} that adapters can change; choose targets among "
            f"{', '.join(sorted(leaves))}."
        )
    return [target for target in known if not wanted or target.name.rpartition(".")[2] in wanted]
