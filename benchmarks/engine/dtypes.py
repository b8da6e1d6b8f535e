"""What weights stored in bf16 cost beside the same computed in fp32: `python -m benchmarks.engine.dtypes`.

For processors that do not multiply bf16, on which PyTorch takes hundreds of times as long with a product of it. Small
models of random weights in this process; of each kind of work the dtypes in turn, the best round of each counts. `fp32`
of what the native kernels compute is PyTorch's; of conversions it is a checkpoint that is stored so. `--weights-memory`
is for the kernels alone and has none.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import transformers
import typer
from msgspec import structs
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from benchmarks.engine.in_process import ring_in
from benchmarks.engine.steps import BLOCK, Row, step_plan
from benchmarks.harness import CORES, Rounds, Sheet, Threads, in_turns, one_of, run, show, timed
from services.executor.core.engine import DraftPlan
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import ExecutorSettings
from services.executor.core.step_plan import to_bytes
from services.executor.model.conversion.convert import convert
from services.executor.training.batch import PackedBatch
from services.executor.training.model import load_trainable
from shared.config import load_settings
from shared.messages import SamplingParams
from shared.messages.training import Hyperparameters

HIDDEN, INNER, LAYERS, VOCABULARY = 768, 2048, 4, 8192
PROMPT, DECODES, DRAFTS = 128, 6, 4
DTYPES = ("auto", "bf16", "fp32")
# The model's heads, and settings. The native kernels compute none of 48, of 16 values each.
RINGS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "kernels": (12, {}),
    "modules": (48, {}),
    "modules, codes": (48, {"weight_dtype": "q4_k"}),
    "draft model": (12, {"draft_model": 48}),
    "draft head": (12, {"draft_model": 0}),
    "adapter, kernels": (12, {"max_adapters": 1}),
    "adapter, modules": (48, {"max_adapters": 1}),
}
ENCODERS = {"encoder": "BertModel", "classifier": "BertForSequenceClassification"}
TRAINED = {"fine-tuning": "auto", "fine-tuning, codes": "q8_0"}  # over weights of this --weight-dtype
CONVERTED = {"convert": "f16", "quantize": "int4-g128", "merge an adapter": "bf16"}
KINDS = (*RINGS, *ENCODERS, *TRAINED, *CONVERTED)
WORDS = {"type": "BPE", "vocab": {f"t{token}": token for token in range(VOCABULARY)}, "merges": []}
SHAPE = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}


def eagle3(directory: Path) -> Path:
    """A draft head for the model of 12 heads."""
    described = {**SHAPE, "model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 6}
    described |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "target_hidden_size": HIDDEN}
    layer = {"self_attn.q_proj": (HIDDEN, 2 * HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
    layer |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (HIDDEN // 2, 2 * HIDDEN))
    layer |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (INNER, HIDDEN)) | {"mlp.down_proj": (HIDDEN, INNER)}
    shapes: dict[str, tuple[int, ...]] = {f"midlayer.{name}": shape for name, shape in layer.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    shapes |= dict.fromkeys(norms, (HIDDEN,)) | {"fc": (HIDDEN, 3 * HIDDEN)}
    shapes |= dict.fromkeys(("lm_head", "embed_tokens"), (VOCABULARY, HIDDEN))
    tensors = {f"{name}.weight": torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(described))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


class Bench:
    def __init__(self, directory: Path, threads: int, stack: ExitStack) -> None:
        torch.set_num_threads(threads)
        self._directory, self._threads, self._stack, self._numbers = directory, threads, stack, itertools.count()

    def work(self, kind: str, dtype: str) -> Callable[[], object]:
        if kind in CONVERTED:
            return partial(self._convert, kind, "float32" if dtype == "fp32" else "bfloat16")
        if kind in TRAINED:
            return self._training(dtype, TRAINED[kind])
        if kind in ENCODERS:
            return partial(encode, self._ring(self._model(ENCODERS[kind]), dtype))
        heads, said = RINGS[kind]
        more = dict(said)
        if (of := said.get("draft_model")) is not None:
            more["draft_model"] = str(self._model(heads=of) if of else eagle3(self._directory / "head"))
        adapter = self._lora() if "max_adapters" in said else None
        engine = self._ring(self._model(heads=heads), dtype, **more)
        return partial(generate, engine, adapter, DRAFTS * (of is not None))

    def _model(self, architecture: str = "LlamaForCausalLM", heads: int = 12, dtype: str = "bfloat16") -> Path:
        made = self._directory / f"{architecture}-{heads}-{dtype}"
        if not made.exists():
            kind, of = getattr(transformers, architecture), {"num_key_value_heads": heads // 2}
            of |= {"num_attention_heads": heads, "head_dim": HIDDEN // heads}
            kind(kind.config_class(**SHAPE, **of)).to(getattr(torch, dtype)).save_pretrained(str(made))
            (made / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": WORDS}))
        return made

    def _lora(self) -> Path:
        if not (made := self._directory / "lora").exists():
            base = transformers.LlamaForCausalLM.from_pretrained(self._model())
            get_peft_model(base, LoraConfig(r=16)).save_pretrained(str(made))
        return made

    def _settings(self, model: Path, dtype: str, **more: Any) -> ExecutorSettings:
        said = {"model": str(model), "device": "cpu", "dtype": dtype, "threads": self._threads, "kv_dtype": "bf16"}
        said |= {"kv_memory": 64 << 20, "block_size": BLOCK, "context_length": 256, "weight_cache_bytes": 0}
        return load_settings(ExecutorSettings, **said, **more)

    def _ring(self, model: Path, dtype: str, **more: Any) -> Any:
        (place := self._directory / f"ring-{next(self._numbers)}").mkdir()
        engine = self._stack.enter_context(closing(ring_in(place, self._settings(model, dtype, **more))))
        engine.load(lambda done, total: None)
        return engine

    def _convert(self, kind: str, stored: str) -> None:
        adapter = self._lora() if kind.startswith("merge") else None
        to = (self._directory / f"made-{next(self._numbers)}", "safetensors", CONVERTED[kind], lambda *step: None)
        convert(self._model(dtype=stored), *to, adapter=adapter)

    def _training(self, dtype: str, weights: str) -> Callable[[], object]:
        settings = self._settings(model := self._model(), dtype, weight_dtype=weights)
        how = (Hyperparameters(rank=8), 1, self._threads, torch.device("cpu"), lambda: None)
        made, rows = load_trainable(model, settings, *how), torch.arange(PROMPT - 1)
        batch = PackedBatch(torch.arange(PROMPT), [PROMPT], rows, rows + 1, torch.ones(PROMPT - 1))
        return lambda: made.log_probs(batch, adapter=True, dropout=None)[0].sum().backward()


def encode(engine: Any) -> None:
    text = Row(PROMPT, PROMPT, range(PROMPT // BLOCK))
    engine.execute(step_plan([text], sample_rows=b"", pools=to_bytes([0, PROMPT])), [])


def generate(engine: Any, adapter: Path | None, drafts: int) -> None:
    """A prompt, and steps behind it, each with as many drafts, which count as wrong."""
    end, width, greedy = PROMPT + 1 + drafts, 1 + drafts, SamplingState(SamplingParams(temperature=0), [1], [])
    which = {"followed": drafts > 0} if adapter is None else {"adapters": to_bytes([0])}
    prompt = step_plan([Row(PROMPT, PROMPT, range(PROMPT // BLOCK))], **which)
    engine.execute(structs.replace(prompt, adapter_loads=[(0, str(adapter))] if adapter else []), [greedy])
    one = step_plan([Row(PROMPT + 1, 1, range(-(-end // BLOCK)))], of_draft=True)
    ahead = DraftPlan(
        structs.replace(one, context_lens=to_bytes([end])), drafts, to_bytes([*range(PROMPT + 1, end - 1)])
    )
    step = step_plan([Row(end, width, range(-(-end // BLOCK)))], **which, sample_rows=to_bytes([*range(width)]))
    for _ in range(DECODES):
        if drafts:
            engine.draft(ahead, [greedy])
        engine.execute(step, [greedy] * width)


def main(
    kinds: Annotated[str, typer.Option(help="Which kinds of work, with ; between them.")] = ";".join(KINDS),
    threads: Threads = CORES,
    rounds: Rounds = 5,
) -> None:
    """Times with weights in bf16 as shares of those in fp32."""
    rows = []
    for kind in one_of("--kinds", kinds.split(";"), KINDS):
        with TemporaryDirectory() as scratch, ExitStack() as stack:
            bench = Bench(Path(scratch), threads, stack)
            work = {dtype: timed(bench.work(kind, dtype)) for dtype in DTYPES}
            best = {dtype: min(taken) for dtype, taken in in_turns(work, rounds, 1).items()}
        rows.append((kind, f"{best['fp32'] * 1e3:.1f}", *(f"{best[one] / best['fp32']:.2f}" for one in DTYPES[:-1])))
    show(Sheet(("kind", "fp32, ms", "auto", "bf16"), rows))


if __name__ == "__main__":
    run(main)
