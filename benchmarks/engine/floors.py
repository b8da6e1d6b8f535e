"""Steps of models of about a billion random weights beside what the machine could do at best:
`python -m benchmarks.engine.floors --help`.

    decode     the bytes that a step reads and writes (weights, recurrent states, keys and values), over the rate at
               which this machine's threads read memory
    prefill    the multiplications of its products, over the rate of the kernels' own products with as many rows

Rates and steps are measured in turns, and the best of each counts, so that a machine that others use troubles them
alike. What the weights say does not matter; there is no tokenizer. With `--llama-cpp` the same steps of the same
weights by llama.cpp, where it serves the architecture (`llama_cpp.py`).
"""

import ctypes
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from benchmarks.engine.llama_cpp import LlamaCpp
from benchmarks.engine.steps import Decode, Prefill, load_one_rank
from benchmarks.harness import CORES, Rounds, Sheet, Threads, in_turns, one_of, run, show, timed
from services.executor.core.step_plan import StepPlan

DEVIATION = 0.02
NUMBERS = 1 << 25  # random ones, which all tensors take from
BLOCKS = 1024
DECODES = ((1, 128), (8, 128), (16, 320))  # (sequences, tokens in each one's context)
PREFILLS = (256, 512)
_RUNS = 3  # of llama.cpp's benchmark, of which the best counts

# Configurations by what they are shaped like.
SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_bytes())


def write_random(directory: Path, settings: dict[str, Any]) -> None:
    """A bf16 checkpoint of random weights, of any architecture of transformers."""
    from safetensors.torch import save_file
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[settings["model_type"]](**settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(str(directory))
    pool = torch.empty(NUMBERS, dtype=torch.bfloat16).normal_(0, DEVIATION)
    files: dict[str, Any] = {}
    kept = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    for number, (name, parameter) in enumerate([*model.named_parameters(), *buffers]):
        count = parameter.numel()
        values = torch.ones(count, dtype=torch.bfloat16)
        if parameter.dim() > 1:
            values = pool.repeat(-(-count // NUMBERS))[:count] if count > NUMBERS else pool[:count]
        file = f"model-{number:05}.safetensors"
        tensors = published(name, values.view(parameter.shape))
        save_file({each: tensor.contiguous() for each, tensor in tensors.items()}, directory / file)
        files |= dict.fromkeys(tensors, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))


def published(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A parameter of transformers under the names that checkpoints have: of stacked experts a tensor each."""
    stem, _, leaf = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf)
    if parts is None or not stem.endswith(".experts"):
        return {name: tensor}
    return {
        f"{stem}.{expert}.{part}.weight": half.clone()
        for expert, weight in enumerate(tensor)
        for part, half in zip(parts, weight.chunk(len(parts)), strict=True)
    }


class Floor(NamedTuple):
    """What a step takes at least."""

    nbytes: int
    operations: int

    def milliseconds(self, rates: "Rates") -> float:
        return 1e3 * max(self.nbytes / rates.memory, self.operations / rates.products)


class Rates(NamedTuple):
    memory: float  # bytes a second
    products: float  # operations a second, of bf16


class Machine:
    """Measures the rates of this machine."""

    def __init__(self, library: Any, threads: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        from services.executor.cpu.packed_linear import PackedLinear, one_after_another
        from services.executor.native.library import RzModel

        self._library = library
        self._decoder = library.rz_decoder_new(ctypes.byref(RzModel()), threads, None)
        weight = torch.randn(_OUTPUTS, _INPUTS).bfloat16()
        with ThreadPoolExecutor(threads) as pool:
            self._linear = PackedLinear.of(library, one_after_another([(weight, None)]), pool, threads)
        self._x, self._out = torch.randn(512, _INPUTS).bfloat16(), torch.empty(512, _OUTPUTS)
        self._large = torch.ones(1 << 27)  # half a gigabyte

    def memory(self) -> float:
        """Seconds for a byte."""
        return timed(self._large.sum)() / self._large.nbytes

    def products(self) -> float:
        """Seconds for an operation."""
        x, out = self._x, self._out
        arguments = (self._decoder, ctypes.byref(self._linear.describe()), x.data_ptr(), len(x), out.data_ptr())
        return timed(lambda: self._library.rz_decoder_multiply(*arguments))() / (2 * len(x) * _OUTPUTS * _INPUTS)


_OUTPUTS, _INPUTS = 6144, 2048


def floor_of(runner: Any, store: Any, sequences: int, context: int, tokens: int) -> Floor:
    """Of a step of `tokens` tokens of `sequences` sequences, each `context` long."""
    packed = runner.packed
    projections = [] if packed.inputs is None else [(packed.inputs.projection, 1.0, 1.0)]
    # What nobody reads but where a token is sampled: layers at the end that store nothing, and the last layer before
    # them behind its attention.
    first_reader = max(index for index, layer in enumerate(packed.layers) if not layer.reads_only) + 1
    last = packed.layers[first_reader - 1]
    of_all = [one for layer in packed.layers[: first_reader - 1] for one in _shares(layer, tokens)] + projections
    of_all += [one for one in _shares(last, tokens) if _is_of_all(last, one[0])]
    of_sampled = [one for one in _shares(last, sequences) if not _is_of_all(last, one[0])]
    of_sampled += [one for layer in packed.layers[first_reader:] for one in _shares(layer, sequences)]
    of_sampled.append((packed.head, 1.0, 1.0))
    weights = sum(linear.nbytes * read for linear, read, _ in of_all + of_sampled)
    states = 0 if store.states is None else 2 * store.states.slot_bytes * sequences
    pages = sequences * context * store.shape.bytes_per_block // store.block_size
    operations = 2 * (_values(of_all) * tokens + _values(of_sampled) * sequences)
    return Floor(int(weights) + states + pages, int(operations))


def _is_of_all(last: Any, linear: Any) -> bool:
    latent = last.latent
    stores = (last.qkv, latent.query_b, latent.keys) if latent is not None else (last.qkv,)
    return last.recurrent is not None or any(linear is one for one in stores)


def _values(shares: list[tuple[Any, float, float]]) -> float:
    return sum(part.outputs * part.inputs * used for linear, _, used in shares for part in linear.parts)


def _shares(layer: Any, tokens: int) -> Iterator[tuple[Any, float, float]]:
    """The linears of a layer: how much of each is read, and by how much of it a token is multiplied. Of experts that
    are chosen evenly."""
    experts = layer.experts
    for linear in layer.linears:
        if experts is not None and any(linear is one for one in (experts.gate_up, experts.down)):
            chosen = experts.choice.chosen / experts.count
            yield linear, 1 - (1 - chosen) ** tokens, chosen
        else:
            yield linear, 1.0, 1.0


def least(work: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Of what each returns, in turns."""
    return {name: min(taken) for name, taken in in_turns(work, rounds).items()}


def beside(llama_cpp: LlamaCpp, model: Path, threads: int) -> dict[str, float]:
    """Milliseconds of llama.cpp's steps, the least of some runs."""
    file = llama_cpp.convert(model)
    work = {_decode(*case): partial(llama_cpp.decode_ms, file, *case, threads) for case in DECODES}
    work |= {_prefill(tokens): partial(llama_cpp.prefill_ms, file, tokens, threads) for tokens in PREFILLS}
    return least(work, _RUNS)


def _decode(sequences: int, context: int) -> str:
    return f"decode {sequences} x {context}"


def _prefill(tokens: int) -> str:
    return f"prefill {tokens}"


def measured(
    name: str, directory: Path, threads: int, rounds: int, llama_cpp: LlamaCpp | None = None
) -> tuple[Sheet, Sheet]:
    """Steps and their floors; and where the time goes by part."""
    from services.executor.native.library import load_library

    others = beside(llama_cpp, directory, threads) if llama_cpp else {}
    runner, store = load_one_rank(directory, "bf16", threads, BLOCKS)
    if not runner.is_native:
        raise typer.BadParameter(f"{name} is not computed by the native kernels here")
    machine = Machine(load_library(), threads)
    kinds: dict[str, tuple[Decode | Prefill, Floor]] = {
        _decode(n, context): (Decode(n, context), floor_of(runner, store, n, context, n)) for n, context in DECODES
    }
    kinds |= {_prefill(n): (Prefill(n), floor_of(runner, store, 1, n, n)) for n in PREFILLS}
    rows, columns = [], dict[str, dict[str, float]]()
    for label, (kind, floor) in kinds.items():
        steps = kind.steps(BLOCKS, 0)
        for plan in steps.before:
            runner.forward(plan)
        spent: list[tuple[float, dict[str, float]]] = []

        def step(plan: StepPlan = steps.measured, spent: Any = spent) -> float:
            before, taken = runner.spent(), timed(lambda: runner.forward(plan))()
            after = runner.spent()
            spent.append((taken, {part: after[part] - before[part] for part in after}))
            return taken

        best = least({"step": step, "memory": machine.memory, "products": machine.products}, rounds)
        taken, bound = best["step"] * 1e3, floor.milliseconds(Rates(1 / best["memory"], 1 / best["products"]))
        theirs = [f"{others[label]:.1f}", f"{others[label] / taken:.2f}"] if others else []
        rows.append((label, f"{taken:.1f}", f"{bound:.1f}", f"{bound / taken:.0%}", *theirs))
        columns[label] = min(spent, key=lambda one: one[0])[1]
    head = ("step", "ms", "floor", "floor / step", *(("llama.cpp", "times as fast") if others else ()))
    parts = [(part, *(f"{one[part] * 1e3:.1f}" for one in columns.values())) for part in runner.spent()]
    title = "by part of the kernels, of the step that took least"
    return Sheet(head, rows, f"{name}, {threads} threads"), Sheet(("ms", *columns), parts, title)


def main(
    shapes: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "qwen3.5",
    threads: Threads = CORES,
    rounds: Rounds = 10,
    layers: Annotated[int, typer.Option(help="Of each model; 0: as many as it has.", min=0)] = 0,
    profile: Annotated[bool, typer.Option(help="Also print where the time goes.")] = False,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(help="Source of llama.cpp, built in build/: its times for the same steps beside ours."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A model's directory whose tokenizer llama.cpp's converter gets.")
    ] = None,
) -> None:
    """Steps of models of random weights, and their floors."""
    if llama_cpp and not tokenizer:
        raise typer.BadParameter("--llama-cpp also needs --tokenizer")
    chosen = one_of("--shapes", shapes.split(","), SHAPES)
    peer = LlamaCpp(llama_cpp, tokenizer) if llama_cpp and tokenizer else None
    for name in chosen:
        with tempfile.TemporaryDirectory() as directory:
            write_random(Path(directory), SHAPES[name] | ({"num_hidden_layers": layers} if layers else {}))
            steps, parts = measured(name, Path(directory), threads, rounds, peer)
            show(steps, *([parts] if profile else []))


if __name__ == "__main__":
    run(main)
