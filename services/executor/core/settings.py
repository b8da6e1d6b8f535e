"""Settings of an executor, and of each of its groups: one model, one ring.

Some are written as text, which is parsed here:

--kv-dtype int8 --kv-dtype-layers "0=bf16,-1=bf16"     of 4 layers     bf16 int8 int8 bf16
--speculation auto                                     at most MOST_DRAFTS drafts per sequence and step
--slow-step 4x                                         steps that take 4 times as long as usual are logged
"""

import hashlib
import math
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from shared.data_types import BLOCK_DTYPES, BlockDType, DType, KvDType, WeightDType
from shared.errors import ConfigurationError
from shared.model_store.packed import ENDING
from shared.model_store.settings import ModelStoreSettings
from shared.models import HUB, ReasoningParser, ToolParser, gguf_name, path_of

AdapterDtype = Literal["auto", "bf16", "int8"]


def parse_layers(text: str) -> dict[int, BlockDType]:
    """`text`, like "0=bf16,-1=int8", as {layer: dtype}; negative layers count from the last.

    Raises ValueError with a phrase that says what is wrong.
    """
    layers: dict[int, BlockDType] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        number, _, name = (side.strip() for side in part.partition("="))
        dtype = next((dtype for dtype in BLOCK_DTYPES if dtype == name), None)
        if dtype is None or not number.removeprefix("-").isdecimal():
            raise ValueError(f"{part!r} is not LAYER={'|'.join(BLOCK_DTYPES)}, such as 0=bf16 or -1=bf16")
        if int(number) in layers:
            raise ValueError(f"layer {int(number)} is named twice")
        layers[int(number)] = dtype
    return layers


def layer_dtypes(default: BlockDType, overrides: Mapping[int, BlockDType], num_layers: int) -> list[BlockDType]:
    """One name per layer. Raises `ConfigurationError` when an override names no layer of the model, or one twice."""
    dtypes: list[BlockDType] = [default] * num_layers
    named = set()
    for layer, dtype in overrides.items():
        if not -num_layers <= layer < num_layers:
            raise ConfigurationError(
                f"--kv-dtype-layers names layer {layer}, which the model does not have; choose 0 to "
                f"{num_layers - 1}, or -1 to -{num_layers} to count from the last."
            )
        if layer % num_layers in named:
            raise ConfigurationError(
                f"--kv-dtype-layers names layer {layer % num_layers} twice, once counted from the last; name it once."
            )
        named.add(layer % num_layers)
        dtypes[layer] = dtype
    return dtypes


# For `auto`: with the sequence's own token 16, a KV block of the usual size. How many of them pay is decided for
# each step.
MOST_DRAFTS = 15
MOST_EVER = 63


MTP = "mtp"  # `draft_model`: the heads for multi-token prediction of the model's own checkpoint


def most_drafts(setting: str) -> int:
    """Drafts of one sequence at most. Raises ValueError with a phrase that says what is wrong."""
    if setting in ("auto", "off"):
        return MOST_DRAFTS if setting == "auto" else 0
    if not (setting.isascii() and setting.isdecimal() and int(setting) <= MOST_EVER):
        raise ValueError(f"{setting!r} is not auto, off or a number from 0 to {MOST_EVER}")
    return int(setting)


def longest_stretch(setting: str) -> float:
    """How many times as long as without it a step with part of a long prompt may take; 0: any time. Raises ValueError
    with a phrase that says what is wrong."""
    if setting == "off":
        return 0.0
    found = re.fullmatch(r"\d{1,3}(\.\d{1,6})?", setting, re.ASCII)
    if found is None or float(setting) < LEAST_STRETCH:
        raise ValueError(f"{setting!r} is not off or a number of at least {LEAST_STRETCH}, such as 1.5")
    return float(setting)


LEAST_STRETCH = 1.05  # below that a step's time is not known well enough

SLOW_STEP_FACTOR = 4.0  # how many times as long as usual, by default
SLOW_STEP_LEAST = 0.25  # seconds: nobody misses less, however fast the ring is
SLOW_STEP_INTERVAL = 5.0  # seconds in which one line pays back
SLOW_STEP_BURST = 5  # lines that may follow each other at once

_SLOW_STEP = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>x|s|ms)", re.ASCII)


class SlowSteps:
    """Says of each step whether it was slow, and whether to log it."""

    def __init__(self, factor: float, seconds: float) -> None:
        """Slow is what takes `factor` times as long as expected and `SLOW_STEP_LEAST`; or `seconds` (inf: never)."""
        self._factor = factor
        self._seconds = seconds
        self._lines = float(SLOW_STEP_BURST)
        self._at = -math.inf
        self.suppressed = 0  # slow steps that were not logged since the last one that was

    @classmethod
    def of(cls, setting: str) -> "SlowSteps":
        """`auto`, `off`, a factor (`3x`) or a time (`0.5s`, `200ms`). Raises ValueError with a phrase that
        says what is wrong."""
        if setting == "off":
            return cls(math.inf, math.inf)
        if setting == "auto":
            return cls(SLOW_STEP_FACTOR, math.inf)
        found = _SLOW_STEP.fullmatch(setting)
        number = float(found["number"]) if found else 0.0
        if found is None or number <= 0:
            raise ValueError(f"{setting!r} is not auto, off, a factor such as 4x or a time such as 0.5s")
        if found["unit"] == "x":
            return cls(number, math.inf)
        return cls(math.inf, number / 1000 if found["unit"] == "ms" else number)

    def is_slow(self, seconds: float, expected: float) -> bool:
        """`expected`: what such a step usually takes; 0: not known."""
        if seconds >= self._seconds:
            return True
        return expected > 0 and seconds >= max(SLOW_STEP_LEAST, self._factor * expected)

    def may_log(self, now: float) -> bool:
        """Whether one more line is not too many, at `now` (monotonic seconds); those that are are counted."""
        self._lines = min(SLOW_STEP_BURST, self._lines + max(0.0, now - self._at) / SLOW_STEP_INTERVAL)
        self._at = now
        if self._lines < 1:
            self.suppressed += 1
            return False
        self._lines -= 1
        return True


class ExecutorSettings(ModelStoreSettings):
    """An executor and its group: a tensor-parallel ring of `tp` ranks that serves one model. Groups that it is told to
    load have the same settings, but for what the model's entry in the registry says."""

    model: str = ""
    """Directory, GGUF file or hub name of the model; of GGUF files with the quantization, `org/name:Q4_K_M`. Empty:
    the executor starts without one, and loads what it is told to."""
    revision: str = ""
    """Branch, tag or commit of a hub name; empty: the main branch as it was when it was fetched."""
    takes_models: bool | None = None
    """Whether the executor loads and unloads models when it is told to, beside its own, within `host_memory`; not set:
    where it is started without one."""
    host_memory: int = Field(default=0, ge=0)
    """Bytes that all groups of the executor may take together, weights and KV cache: of its GPUs' memory where it
    computes on GPUs, else of the host's; 0: 90% of what is there."""
    served_model_name: str = ""
    """Name that clients use; empty: made from `model`."""
    group: str = ""
    """Name of the group; empty: the instance's name."""
    tp: int = Field(default=1, ge=1, le=64)
    """Tensor-parallel size: ranks of the ring."""
    dtype: DType = "auto"
    """Data type of weights and computation; `auto`: bf16 where the hardware computes it fast, else fp32. CPUs that do
    not multiply bf16 compute in fp32 what the native kernels do not, with `bf16` too."""
    weight_dtype: WeightDType = "auto"
    """Data type of the linear layers' weights in memory: `auto` keeps what the checkpoint has, unless its config.json
    says `"weight_dtype": "bf16"`, as the built-in model's does; `bf16` unpacks, others quantize while loading: `int8`
    and `fp8` (8 bits a weight), `q8_0` (8.5), `q6_k` (6.6), `q4_k` (4.5) and `int4` (4.4); with the last two embedding
    and output head are `q6_k`, with `fp8` `q8_0`. On GPUs `int8` and `fp8` leave both as they are."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ring computes; `auto`: CUDA GPUs where there are any, else CPUs."""
    engine: Literal["torch", "stub", "vllm"] = "torch"
    """What computes: `torch`, the executor's own ring; `vllm`, a vLLM of its own, which batches, shards and caches by
    itself (docs/engines.md). `stub` computes nothing at a set speed, for tests and benchmarks of the control plane; of
    a `model` it only uses the tokenizer."""
    engine_python: Path | None = None
    """The Python of the environment that has vLLM, with `--engine vllm`; not set: the one that runs the executor."""
    engine_args: str = ""
    """Arguments of the engine, as `vllm serve` has them, with `--engine vllm`: `--tensor-parallel-size 2
    --kv-cache-dtype fp8`. `max_sequences`, `context_length` and `dtype` are passed on where set."""
    engine_url: str = ""
    """URL of a server that runs already and computes for the group, such as `http://127.0.0.1:8000`; the `model` is the
    same one's directory or name, whose tokenizer the gateways have."""
    engine_kind: Literal["", "vllm", "sglang", "llama.cpp"] = ""
    """What answers at `engine_url`."""
    engine_credentials: Path | None = None
    """File with the key that the server at `engine_url` asks for."""
    allow_approximate_continuation: bool = False
    """Whether the group starts while another kind of engine (the executors' own rings, vLLM, SGLang, llama.cpp) serves
    under the same name. An answer may then go on in another kind, and change its text there."""
    weight_cache_bytes: int = Field(default=16 << 30, ge=0)
    """Most bytes on disk for weights as the native CPU kernels lay them out, so that a later start of the same model
    reads them instead of packing them again. Least recently used models are deleted first. 0: none."""
    weights_memory: int = Field(default=0, ge=0)
    """Most bytes of weights that each rank keeps in memory; 0: all. As many whole layers as fit stay there, and the
    others are read from the weight cache's file in each step, a layer ahead of their use, so that a model which is
    larger than memory is served as fast as the disk allows. For the native CPU kernels, with `weight_cache_bytes`."""
    context_length: int = Field(default=0, ge=0)
    """Maximum sequence length, prompt plus output. 0: the model's max_position_embeddings. LongRoPE and dynamic NTK
    have their frequencies by it, and with dynamic NTK and YaRN it may be longer (docs/models.md, Length of texts)."""
    max_sequences: int = Field(default=64, ge=1)
    """Most sequences in one step."""
    max_batch_tokens: int = Field(default=512, ge=1)
    """Token budget of one step: longer prompts are prefilled in chunks (chunked prefill)."""
    prefill_stretch: str = "1.5"
    """How many times as long as usual steps may take beside a prompt that needs more than one of them, while
    interactive requests decode; what fits into that time of the prompt is computed. `off`: as much as
    `max_batch_tokens` allows, however long that takes."""
    prefill_gap: float = Field(default=0.02, ge=0, le=10)
    """Seconds that such a step may take in any case: where steps are short, `prefill_stretch` alone would leave a
    prompt next to nothing, and nobody sees whether a token comes after 6 or 20 ms. 0: `prefill_stretch` alone
    counts."""
    max_waiting: int = Field(default=1024, ge=1)
    """Most accepted sequences that wait for a place in the batch; more are refused for the time being. Sequences of
    the batch lane take none of these places from others."""
    draft_model: str = ""
    """A smaller model whose proposals the model checks, several at a time, best of the same vocabulary: directory, GGUF
    file or hub name, also of an EAGLE-3 head of the model; `mtp`: the model's own heads for multi-token prediction. It
    changes the speed, not how tokens are drawn (docs/performance.md). Empty: none."""
    speculation: str = "auto"
    """Speculative decoding by n-grams (prompt lookup), and by a draft model where there is one, in draft tokens per
    sequence and step: `auto` (up to 15, as many as pay off), `off`, or the maximum. It changes the speed, not how
    tokens are drawn. Models with recurrent state need memory for the state behind each (docs/performance.md)."""
    cuda_graphs: Literal["auto", "all", "off"] = "auto"
    """CUDA graphs of steps on GPUs, captured at start-up: `auto` (decodes, for batches of up to `max_sequences`, where
    the model's decoder supports it), `all` (steps with prompt chunks too; not yet shown right on a GPU) or `off`. They
    change the speed, never the tokens."""
    cuda_graphs_memory: int = Field(default=1 << 30, ge=1)
    """Most bytes of GPU memory that these graphs take; larger batches are captured first."""
    max_adapters: int = Field(default=64, ge=0, le=1024)
    """LoRA adapters that each rank holds in memory at a time; further ones wait for a place. 0: adapters are
    refused."""
    max_adapter_rank: int = Field(default=64, ge=1, le=256)
    """Highest rank of a LoRA adapter; others are refused."""
    adapter_dtype: AdapterDtype = "auto"
    """What the native CPU kernels keep LoRA adapters as: `int8`, codes of 8 bits with scales, or `bf16`, twice the
    bytes of every step; `auto`: int8. All else computes adapters in the model's data type, and refuses another."""
    adapter_cache_bytes: int = Field(default=16 << 30, ge=0)
    """Most bytes on disk for files of LoRA adapters, in `.adapters` of `model_cache`, shared by all groups of the host.
    The least recently used that no group needs are deleted first."""
    batch_invariant: bool = False
    """Batch-invariant computation on GPUs: every row of a step has the bits that it would have alone, so that a
    text depends neither on the batch, nor on prefix hits, nor on the ring. Slower (docs/gpu.md). The native CPU
    kernels are always batch-invariant."""
    warm_up: Literal["auto", "off"] = "auto"
    """On GPUs with Triton, steps of every kind run before the ring is ready, so that their kernels are compiled:
    seconds for each the first time, less once Triton has cached them. `off`: the first requests wait for it."""
    lookahead: Literal["auto", "on", "off"] = "auto"
    """Whether a step may be launched before the tokens of the one before it are known (asynchronous scheduling), so
    that planning and publishing cost no time between steps; `auto`: where a GPU computes. It changes the speed,
    never the text."""
    sparse_attention: bool = False
    """Keeps the mean and the deviation of each KV block's keys, so that requests may ask for sparse attention to the
    pages that score best (docs/long-contexts.md). With int8 blocks of 16 tokens an eighth more KV memory."""
    block_size: int = Field(default=16, ge=1)
    """Tokens per KV block."""
    kv_dtype: KvDType = "auto"
    """Data type of full KV blocks: `bf16` (as computed), or the codec that compresses them; `auto`: `int8` where
    reading it is as fast (native CPU kernels, and GPUs with Triton in bf16), else `bf16`."""
    kv_dtype_layers: str = ""
    """Layers that differ from `kv_dtype`, such as "0=bf16,-1=bf16"; negative numbers count from the last layer."""
    kv_memory: int = Field(default=0, ge=0)
    """Bytes for the KV cache of each rank; 0: from the free memory."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that may be in use once the KV cache is allocated, where `kv_memory` is not set. The
    estimated need of a step is left free in any case."""
    kv_mapped_memory: int = Field(default=0, ge=0)
    """Bytes of a file on disk per rank for full KV blocks, those of running sequences too; 0: they lie in memory. The
    system keeps the parts that were used last in memory, `kv_memory` is what must be there beside the file
    (docs/long-contexts.md, KV beyond memory). For the native CPU kernels."""
    kv_host_memory: int = Field(default=0, ge=0)
    """Bytes of host memory per rank to which KV blocks of sessions are evicted; 0: none. For GPUs, which pin it at
    start: on a CPU the same bytes are worth more as `kv_memory`."""
    kv_disk_memory: int = Field(default=0, ge=0)
    """Bytes on disk per rank to which KV blocks of sessions are evicted; 0: none. With `kv_disk_directory` they outlive
    the ring (docs/reliability.md, Spilled blocks on disk)."""
    kv_disk_directory: Path | None = None
    """Where `kv_disk_memory` goes, to files that the next ring finds again, and `kv_mapped_memory`, to files that end
    with their process; unset: both end with it, in the directory for temporary files, which is no use where that is in
    memory."""
    kv_session_ttl: float = Field(default=900.0, ge=0)
    """Seconds after its last turn during which a session's KV blocks are evicted only after all others; 0: no
    preference."""
    replicas_on_host: int = Field(default=1, ge=1)
    """Executor groups that share this host's memory; each takes its share of it for the KV cache."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of each rank; 0: the cores divided among the ranks."""
    cpu_level: str = ""
    """Level of CPU instructions that the native kernels compute with: `avx2`, `avxvnni`, `avx512vnni`, `avx512bf16`
    or `amx`; on Arm `neon` or `neonbf16`. Empty: the best that the CPU has (docs/performance.md)."""
    fork_server: Literal["auto", "off"] = "auto"
    """A process that has imported all that a rank needs and forks ranks, so that a ring restarts within a second:
    `auto` (on Linux), or `off`, which starts each rank as a new Python. It costs some 25 MB of unshared memory."""
    pin_threads: bool = True
    """Pins each of these threads to a core of its own, where the ring has as many threads as there are cores, and the
    executor takes no other models: the groups of a host share its cores, each as many as are idle."""
    collectives: Literal["auto", "shm", "gloo", "nccl"] = "auto"
    """All-reduce among the ranks of a ring; `auto`: on GPUs NCCL, and symmetric memory for small tensors; shared
    memory on CPUs. `nccl`: NCCL alone, with one rank too. `gloo` uses sockets: slower, for hosts where processes
    may not share memory or where there is no C compiler."""
    ring_host: str = "127.0.0.1"
    """Address at which the ranks of the ring rendezvous, other rings' ranks reach them for a KV hand-over, and trainers
    of other hosts that of a fine-tuning job's first replica; `auto`: the address of this host's name, as in a
    container."""
    hung_after: float = Field(default=3.0, ge=1.0)
    """Seconds without progress, with work in flight, after which the ring is killed and restarted. Progress is told
    layer by layer: set it above what the longest layer takes (a large expert layer in a long prompt on few cores).
    The health monitor reads the same variable, and where it is unset takes 2.5."""
    engine_step_timeout: float = Field(default=60.0, gt=0)
    """Seconds that a step may take with `--engine vllm` or `--engine-url`: such an engine tells of no layers, and
    compiles some kernels when it first needs them. Beyond that it stands still, as it does at once while one of its
    processes is stopped, and is killed after `hung_after` seconds more."""
    start_timeout: float = Field(default=1800.0, gt=0)
    """Seconds that a ring may take to load."""
    drain_grace: float = Field(default=10.0, ge=0)
    """Seconds that running generations get to finish at shutdown; the rest continue on other rings."""
    handover_timeout: float = Field(default=10.0, ge=0)
    """Seconds, after its last generation has ended, in which a leaving ring transfers its sessions' KV blocks to
    its peers; 0: it does not."""
    handover_port: int = Field(default=0, ge=0, le=65535 - 64)
    """Port on `ring_host` at which rank 0 receives KV blocks of other rings, rank r at that plus r; 0: the system
    chooses."""
    tool_parser: ToolParser = "auto"
    """Format in which the model writes tool calls: `auto` (detected from its chat template), `none` (requests with
    tools are refused), or a parser."""
    reasoning_parser: ReasoningParser = "auto"
    """Format in which the model marks its reasoning: `auto` (detected from its chat template), `none` (it is part
    of the answer), or a parser."""
    slow_step: str = "auto"
    """Steps that are logged as slow: `auto` (4 times what such a step usually takes, and at least 250 ms), `off`,
    another factor such as `3x`, or a time such as `0.5s` or `200ms`."""
    dump_directory: Path | None = None
    """Where diagnostics of a hung ring are dumped before it is killed; unset: `ryzanstein-dumps` in the directory
    for temporary files."""
    dump_keep: int = Field(default=10, ge=0)
    """Dumps that are kept there, the newest; 0: none is written."""
    stub_step_ms: float = Field(default=0.0, ge=0)
    """Stub engine: milliseconds per step."""
    stub_us_per_token: float = Field(default=0.0, ge=0)
    """Stub engine: microseconds per token of a step."""
    stub_blocks: int = Field(default=65536, ge=1)
    """Stub engine: KV blocks."""
    stub_context_length: int = Field(default=8192, ge=2)
    """Stub engine: context length."""
    stub_draft_right: float = Field(default=0.0, ge=0, le=1)
    """Stub engine: share of its draft model's proposals that are right; 0: it has none."""
    stub_draft_ms: float = Field(default=0.0, ge=0)
    """Stub engine: milliseconds per pass of its draft model."""
    stub_fault: Literal["", "crash", "exit", "hang", "error"] = ""
    """Stub engine, for tests: what happens to a step that computes token 1."""
    nnodes: int = Field(default=1, ge=1, le=64)
    """Hosts over which the ring is spread, `tp / nnodes` ranks on each."""
    node_rank: int = Field(default=0, ge=0)
    """This host's index among them: host 0 runs the leader and represents the ring; the others start their ranks
    when it tells them to."""
    master_addr: str = ""
    """Address of host 0, as the other hosts reach it."""
    master_port: int = Field(default=29500, ge=1, le=65535)
    """Port on host 0 to which the other hosts connect."""
    ring_secret: SecretStr = SecretStr("")
    """Shared secret by which the hosts of one ring authenticate each other."""

    @property
    def is_host(self) -> bool:
        """Whether it takes models at run time. An executor of the stub engine serves without any model's files."""
        if self.takes_models is None:
            return not self.model and self.engine == "torch" and self.nnodes == 1
        return self.takes_models

    @property
    def unset(self) -> set[str]:
        """What an engine is told only where somebody has set it: it stays unset where settings go on to others."""
        return {"max_sequences"} - self.model_fields_set

    @property
    def serving_engine(self) -> str:
        """The engine that schedules for itself (`engines/catalog.py`); empty: the executor's own ring computes."""
        if self.engine_url:
            return "server"
        return self.engine if self.engine == "vllm" else ""

    @property
    def computes_with(self) -> str:
        """`EngineTraits.kind`; a vLLM is one wherever it runs."""
        return self.engine_kind or self.serving_engine or "ring"

    @property
    def ranks_here(self) -> int:
        """Ranks on each host."""
        return self.tp // self.nnodes

    @property
    def meeting_host(self) -> str:
        """Address on which rank 0 waits for the others."""
        return self.master_addr if self.nnodes > 1 else self.ring_host

    @property
    def max_drafts(self) -> int:
        """Most drafts of one sequence in a step, after `speculation`."""
        return most_drafts(self.speculation)

    @property
    def longest_stretch(self) -> float:
        """The most of a step's usual time, after `prefill_stretch`; 0: any time."""
        return longest_stretch(self.prefill_stretch)

    @field_validator("ring_host")
    @classmethod
    def _find_host(cls, host: str) -> str:
        if host != "auto":
            return host
        name = socket.gethostname()
        try:
            return socket.gethostbyname(name)
        except OSError as error:
            raise ValueError(
                f"this host's name {name!r} does not resolve to an address ({error.strerror or error}); give the "
                "address itself"
            ) from None

    @model_validator(mode="after")
    def _check_nodes(self) -> "ExecutorSettings":
        if self.nnodes == 1:
            if self.node_rank:
                raise ValueError(
                    "node_rank is above 0, so there are other hosts; set nnodes, master_addr and ring_secret too"
                )
            return self
        if self.tp % self.nnodes:
            raise ValueError(f"tp {self.tp} does not divide by nnodes {self.nnodes}: each host has equally many ranks")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank {self.node_rank} is not below nnodes {self.nnodes}; count from 0")
        if not self.master_addr:
            raise ValueError("master_addr is not set: it is the address of host 0, as the others reach it")
        if not self.ring_secret.get_secret_value():
            raise ValueError("ring_secret is not set: hosts that are to be one ring must know the same secret")
        return self

    @field_validator("speculation", "slow_step", "kv_dtype_layers", "prefill_stretch")
    @classmethod
    def _check_text(cls, text: str, field: ValidationInfo) -> str:
        parsers = {
            "speculation": most_drafts,
            "slow_step": SlowSteps.of,
            "kv_dtype_layers": parse_layers,
            "prefill_stretch": longest_stretch,
        }
        parsers[str(field.field_name)](text)
        return text


def packed_directory(settings: ExecutorSettings) -> Path:
    """Of the files of packed weights."""
    return settings.store.packed


def packed_share(settings: ExecutorSettings, rank: int, world_size: int) -> tuple[object, ...]:
    """What sets a rank's packed weights apart from those that others make of the same files."""
    return (rank, world_size, settings.dtype, settings.weight_dtype)


def packed_name(model: Path, share: Iterable[object]) -> str:
    """Name of the file of packed weights of the model in the directory `model`."""
    digest = hashlib.sha256(f"{model.resolve()}\0{[*share]!r}".encode()).hexdigest()
    return f"{model.name[:64]}-{digest[:24]}{ENDING}"


STUB_MODEL = "stub"


# What only the executor's own rings read: an engine that schedules for itself has its own words for it.
RING_ONLY = (
    "weight_dtype",
    "device",
    "tp",
    "nnodes",
    "takes_models",
    "weights_memory",
    "max_batch_tokens",
    "prefill_stretch",
    "prefill_gap",
    "speculation",
    "draft_model",
    "kv_dtype",
    "kv_dtype_layers",
    "kv_memory",
    "collectives",
    "threads",
)


# What only one of these engines reads.
ENGINE_ONLY = {"vllm": ("engine_python", "engine_args"), "server": ("engine_kind", "engine_credentials")}


def check_engine(settings: ExecutorSettings) -> None:
    """Of the settings as they were given. Raises `ConfigurationError` where some do not go with the engine."""
    if settings.serving_engine:
        fields = type(settings).model_fields
        wrong = [name for name in RING_ONLY if getattr(settings, name) != fields[name].default]
        if wrong:
            raise ConfigurationError(
                f"{_option(wrong[0])} is for the executor's own rings; leave it out with --engine vllm and with "
                "--engine-url, and set the like in the engine's own arguments."
            )
    for engine, names in ENGINE_ONLY.items():
        given = [name for name in names if getattr(settings, name)]
        if given and settings.serving_engine != engine:
            needed = "--engine vllm" if engine == "vllm" else "--engine-url"
            raise ConfigurationError(f"{_option(given[0])} goes with {needed}; set that too, or leave it out.")
    if settings.engine_url and settings.engine != "torch":
        raise ConfigurationError("--engine-url names a server that computes; leave --engine out.")
    if settings.engine_url and not settings.engine_kind:
        raise ConfigurationError("--engine-url needs --engine-kind: vllm, sglang or llama.cpp.")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_NUMERIC = (
    "engine",
    "dtype",
    "weight_dtype",
    "device",
    "tp",
    "kv_dtype",
    "kv_dtype_layers",
    "block_size",
    "collectives",
)


def served_name(settings: ExecutorSettings) -> str:
    """The name that was set, else the last part of the path, else the hub name as it stands."""
    if settings.served_model_name:
        return settings.served_model_name
    if not settings.model:
        return STUB_MODEL
    if (path := path_of(settings.model)) is not None and path.exists():
        return gguf_name(path) if path.suffix == ".gguf" else path.resolve().name
    return settings.model.removeprefix(HUB)


def numeric_settings(settings: ExecutorSettings) -> list[str]:
    """Those that what a model computes depends on, beside its files and what computes (`EngineSpec.numerics`)."""
    return [f"{name}={getattr(settings, name)}" for name in _NUMERIC]


def thread_count(settings: ExecutorSettings) -> int:
    """CPU threads of each rank: what was set, else the cores shared out among the ranks."""
    return settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.ranks_here)


def spare_cores(settings: ExecutorSettings) -> int:
    """Cores that each rank has beside those that its threads compute on."""
    return max(0, len(os.sched_getaffinity(0)) // settings.ranks_here - thread_count(settings))


def cores_of(settings: ExecutorSettings, rank: int) -> list[int]:
    """The core of each of a rank's threads; empty where they are not to be kept on one. With fewer threads than
    cores the system places them better: it knows what else runs."""
    cores, threads = sorted(os.sched_getaffinity(0)), thread_count(settings)
    if not settings.pin_threads or threads * settings.ranks_here != len(cores):
        return []
    here = rank % settings.ranks_here
    return cores[here * threads : (here + 1) * threads]
