"""A ring of one rank in this process, as it is served: `RingEngine`, `Scheduler` and sampler, over a model of
random weights that is made where it is used: neither files nor host memory, so a 13B takes a second.

Only reading the weights is taken out of the engine's way; everything else is chosen by its settings. Weights are
normal, with a deviation that keeps activations at about one: what is measured does not depend on what they say.
"""

import random
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from msgspec import structs
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.engine.in_process import ring_in
from benchmarks.engine.steps import Row, step_plan
from benchmarks.on_gpu.shapes import BLOCK, Shape
from benchmarks.random_model import random_rows
from services.executor.collectives.base import SingleRank
from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.model.attention import register_attention
from services.executor.model.loading import loader
from services.executor.model.parallel.layers import VocabParallelEmbedding, VocabParallelHead, WeightShard
from services.executor.model.parallel.module_patches import attention_to_build_with
from services.executor.model.parallel.splitting import apply_plan
from services.executor.model.quantizing import RowsCodec
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.worker.backends import catalog as backends
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.backends.cpu_kernels import CpuKernels
from services.executor.worker.backends.gpu_decoder import gpu_runner
from services.executor.worker.runner import ModelRunner
from shared.config import load_settings
from shared.messages import GenerationRequest, SamplingParams

SEED = 7
DEVIATION = 0.02


def served_model(
    config: Any, dtype: torch.dtype, device: torch.device, seed: int = SEED, codec: Any = None
) -> nn.Module:
    """One rank's model as `loader.load_model` returns it, with random weights; with a `codec` its linear layers are
    quantised."""
    register_attention()
    model = _empty(config, dtype, attention_to_build_with(config))
    apply_plan(model, config, ShardLayout.from_config(config, 1, 0), SingleRank())
    filled: nn.Module = fill(model, dtype, device, seed)
    if codec is not None:
        _quantize(filled, codec)
    return filled


def _quantize(model: nn.Module, codec: Any) -> None:
    """One layer after the other, so that both kinds of weights are held of one alone. Embedding and head by codecs that
    have another for them."""
    from services.executor.model.weight_formats import quantize

    vocabulary = codec.for_vocabulary() if isinstance(codec, RowsCodec) else None
    for module in model.modules():
        if isinstance(module, WeightShard):
            weight = module.weight
            of_vocabulary = isinstance(module, VocabParallelHead | VocabParallelEmbedding)
            chosen = vocabulary if of_vocabulary else codec
            if isinstance(chosen, RowsCodec):
                module.keep_quantized(random_rows(chosen, len(weight), weight.shape[1], weight.device))
            elif chosen is not None:
                module.keep_quantized(quantize(weight, chosen))


def plain_model(
    config: Any, dtype: torch.dtype, device: torch.device, seed: int = SEED, attention: str = "sdpa"
) -> Any:
    """transformers' own model of the same weights: what has the same name is the same."""
    return fill(_empty(config, dtype, attention), dtype, device, seed)


def _empty(config: Any, dtype: torch.dtype, attention: str) -> Any:
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    return model


def fill(model: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Gives every parameter its numbers on `device`; tied ones stay tied. Vectors (norms) are near one, biases near
    nothing. What a parameter gets depends on its name, shape and `seed` alone."""
    filled: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in filled:
            numbers = _numbers(name, parameter, dtype, device, seed)
            filled[id(parameter)] = nn.Parameter(numbers, requires_grad=False)
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, filled[id(parameter)])
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return model.eval()


def _numbers(name: str, parameter: torch.Tensor, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) + seed)
    made = torch.empty(parameter.shape, dtype=dtype, device=device)
    made.normal_(0.0, DEVIATION, generator=generator)
    if parameter.dim() == 1 and name.endswith("weight"):
        made += 1.0
    return made


GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Served:
    """A loaded ring of one."""

    engine: Any
    spec: EngineSpec
    settings: ExecutorSettings
    device: torch.device

    @property
    def store(self) -> Any:
        return self.runner._store  # noqa: SLF001  # a benchmark looks inside

    @property
    def runner(self) -> Any:
        return self.engine._member.runner  # noqa: SLF001

    def batcher(self) -> Scheduler:
        limits = BatchSettings(self.settings.max_batch_tokens, self.settings.max_sequences, max_drafts=0)
        return Scheduler(self.spec, limits, "benchmark")

    def fill_cache(self) -> None:
        """Random keys and values in every block, without computing a prompt."""
        store = self.store
        for layer in range(store.shape.num_layers):  # one at a time: the generator takes memory of its own
            store.writable(layer).normal_(0.0, 0.5)
        for quantized in store.quantized_layers():
            for codes in quantized.codes:
                _random_codes(codes)
            if quantized.scales is not None:
                quantized.scales.fill_(0.004 if quantized.codes.dtype == torch.int8 else 0.002)

    @property
    def looks_ahead(self) -> bool:
        """Whether steps are launched before the one before them is over."""
        setting = self.settings.lookahead
        return setting == "on" or (setting == "auto" and self.spec.overlaps)

    def step(self, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
        """Computes and samples one step, and waits for its tokens."""
        found: list[SampledToken] = self.engine.execute(plan, samples)
        return found

    def launch(self, plan: StepPlan, samples: Sequence[SamplingState]) -> Callable[[], list[SampledToken]]:
        """Begins a step; what is returned waits for its tokens."""
        if not self.looks_ahead:
            return partial(self.step, plan, samples)
        result: Callable[[], list[SampledToken]] = self.engine.launch(plan, samples).result
        return result


def _random_codes(codes: torch.Tensor) -> None:
    """Any int8; any e4m3 but NaN; numbers where nothing is compressed."""
    if codes.dtype.itemsize > 1:
        codes.normal_(0.0, 0.5)
        return
    raw = codes.view(torch.int8)
    if codes.dtype == torch.int8:
        raw.random_(-127, 128)
    else:
        raw.random_(-112, 113)  # of e4m3's bits 0x7f and 0xff are NaN, and those of -1 is 0xff
        raw.masked_fill_(raw == -1, 0)


@contextmanager
def served(
    model: Shape | Any, device: torch.device, dtype: torch.dtype = torch.bfloat16, **wanted: Any
) -> Iterator[Served]:
    """A ring of one that serves a random model of a shape, or of a configuration of transformers'; `wanted`: settings
    of the executor. Kernels are compiled as they come up: what is measured is run before."""
    config = model.config() if isinstance(model, Shape) else model
    config.dtype = "float32" if dtype == torch.float32 else "bfloat16"
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, "model")
        config.save_pretrained(str(directory))
        settings = load_settings(
            ExecutorSettings,
            model=str(directory),
            device=device.type,
            dtype="fp32" if dtype == torch.float32 else "bf16",
            **{"block_size": BLOCK, "threads": 1 if device.type == "cpu" else 0, "warm_up": "off", **wanted},
        )
        engine = ring_in(Path(scratch), settings)
        with random_weights(config), gpu_path(device, settings):
            engine_spec = engine.load(lambda done, total: None)
        try:
            yield Served(engine, engine_spec, settings, device)
        finally:
            engine.close()


@contextmanager
def random_weights(config: Any) -> Iterator[None]:
    """While it lasts, engines that load a model get one of random weights."""
    real = loader.load_model

    def load(
        directory: Path,
        dtype: torch.dtype,
        layout: Any,
        collectives: Any,
        device: torch.device,
        *rest: Any,
        **_of_files: Any,
    ) -> Any:
        """`rest`: progress, and how the weights are kept where they are quantised."""
        return served_model(config, dtype, device, codec=rest[1] if len(rest) > 1 else None)

    loader.load_model = load
    try:
        yield
    finally:
        loader.load_model = real


@contextmanager
def gpu_path(device: torch.device, settings: Any) -> Iterator[None]:
    """While it lasts, engines on the CPU compute as on a GPU, their kernels in Triton's interpreter: dry runs."""
    if device.type != "cpu" or find_spec("triton") is None:
        yield
        return
    real = backends.BACKENDS
    backends.BACKENDS = (_GpuOnCpu(settings), *real)
    try:
        yield
    finally:
        backends.BACKENDS = real


class _GpuOnCpu(CpuKernels):
    """All as on a CPU, but for what computes."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def runner(self, request: RunnerRequest) -> ModelRunner:
        graphs = _as_graphs(self._settings, request.model.config)
        model, store, layout, collectives, *_ = request
        return gpu_runner(model, store, layout, collectives, request.spill, **graphs)


def _as_graphs(settings: Any, config: Any) -> dict[str, Any]:
    """What makes a runner stage and pad its steps as for graphs, which are then computed each time anew."""
    from services.executor.core.step_plan import StepLimits
    from services.executor.gpu.graphs import Rerun

    context = settings.context_length or config.max_position_embeddings
    memory = 0 if settings.cuda_graphs == "off" else 1 << 30
    steps = settings.max_sequences, settings.max_batch_tokens, context
    limits = StepLimits(*steps, memory, settings.batch_invariant, settings.cuda_graphs == "all")
    return {"limits": limits, "capture": Rerun()}


def decode_plan(batch: int, context: int, num_writable: int, num_quantized: int, seed: int = 1) -> StepPlan:
    """One token for each of `batch` sequences of `context` tokens, the new one included: last blocks writable, full
    ones quantized where there are quantized ones. Raises ValueError where the blocks are not enough.

    writable   | last block of each sequence |   full blocks (quantized, or writable behind these)   | 0's | 1's | ...
    """
    full = (context - 1) // BLOCK
    first = num_writable if num_quantized else batch
    if first + batch * full > num_writable + num_quantized or batch > num_writable:
        raise ValueError(
            f"{batch} x {context} tokens need {batch * (full + 1)} blocks of {num_writable + num_quantized}"
        )
    # Blocks of one sequence are seldom neighbours in a server that has run for a while.
    kept = np.random.default_rng(seed).permutation(first + np.arange(batch * full)).reshape(batch, full)
    rows = [Row(context, 1, np.append(kept[at], at)) for at in range(batch)]
    tokens = np.random.default_rng(seed).integers(0, 200, batch)
    return step_plan(rows, BLOCK, num_decodes=batch, token_ids=to_bytes(tokens))


def prefill_plan(tokens: int, before: int, num_writable: int, num_quantized: int, *, last: bool) -> StepPlan:
    """A chunk of `tokens` tokens of one prompt whose `before` first tokens are computed (a multiple of BLOCK); its
    last row is sampled where it is the `last` chunk."""
    past = before // BLOCK
    own = -(-tokens // BLOCK)
    first = num_writable if num_quantized else own
    table = np.concatenate((first + np.arange(past), np.arange(own)))
    if first + past > num_writable + num_quantized or own > num_writable:
        raise ValueError(f"{before} + {tokens} tokens need {past + own} blocks of {num_writable + num_quantized}")
    return step_plan(
        [Row(before + tokens, tokens, table)],
        BLOCK,
        num_decodes=0,
        token_ids=to_bytes(np.random.default_rng(1).integers(0, 200, tokens)),
        sample_rows=to_bytes([tokens - 1] if last else []),
    )


def greedy(rows: int) -> list[SamplingState]:
    """What the sampler knows of as many sequences that take the likeliest token."""
    return [SamplingState(GREEDY, [1], []) for _ in range(rows)]


def random_prompts(lengths: Iterable[int], seed: int, below: int = 250) -> list[list[int]]:
    """Tokens that differ: of a prompt of one token alone all values are alike, and attention to whatever keys gives the
    same."""
    draw = random.Random(seed)
    return [[draw.randrange(3, below) for _ in range(length)] for length in lengths]


class BackToBack:
    """The same decodes again and again, as a server computes them: launched one ahead where the ring does that, with
    tokens that stay on the device, else one after the other."""

    def __init__(self, ring: Served, plan: StepPlan) -> None:
        self._ring = ring
        self._samples = greedy(plan.num_decodes)
        self._first = plan
        self._ahead = structs.replace(plan, token_ids=to_bytes(-1 - np.arange(plan.num_decodes)))
        self._step = 0
        self._flights: deque[Callable[[], list[SampledToken]]] = deque()

    def __call__(self) -> None:
        """Takes one step's tokens; the next step is under way by then."""
        if not self._flights:
            self._launch(self._first)
        if self._ring.looks_ahead:
            self._launch(self._ahead)
        self._flights.popleft()()

    def drain(self) -> None:
        """Takes what is under way."""
        while self._flights:
            self._flights.popleft()()

    def _launch(self, plan: StepPlan) -> None:
        self._step += 1
        self._flights.append(self._ring.launch(structs.replace(plan, step=self._step), self._samples))


@dataclass
class Run:
    """Requests from the first to the last token."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    # Seconds of each step, from the end of the one before it.
    steps: list[float] = field(default_factory=list)
    seconds: float = 0.0


def generate(ring: Served, prompts: Sequence[Sequence[int]], new_tokens: int, sampling: SamplingParams = GREEDY) -> Run:
    """All prompts at once through the batcher and the engine, with nothing between steps but what a leader does."""
    batcher: Any = ring.batcher()
    run = Run(tokens={str(at): [] for at in range(len(prompts))})
    for at, prompt in enumerate(prompts):
        refusal = batcher.add(GenerationRequest(str(at), str(at), "m", "c", list(prompt), new_tokens, sampling))
        if refusal is not None:
            raise RuntimeError(f"the ring refused a prompt: {refusal.message}")
    began = over = time.perf_counter()
    flights: deque[Callable[[], list[SampledToken]]] = deque()
    while batcher.has_work or flights:
        if not flights:
            _launch(ring, flights, batcher.schedule(time.perf_counter()))
        if ring.looks_ahead:
            _launch(ring, flights, batcher.schedule_ahead(time.perf_counter()))
        sampled = flights.popleft()()
        for entries in batcher.update(sampled, time.perf_counter() - over).values():
            for entry in entries:
                run.tokens[entry.generation_id] += entry.tokens
        now = time.perf_counter()
        run.steps.append(now - over)
        over = now
    run.seconds = time.perf_counter() - began
    return run


def _launch(ring: Served, flights: "deque[Callable[[], list[SampledToken]]]", scheduled: Any | None) -> None:
    if scheduled is not None:
        plan, rows = scheduled
        flights.append(ring.launch(plan, [row.sampling for row in rows]))
