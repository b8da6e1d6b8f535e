"""Settings of an executor: one group, one model, one ring."""

import socket
from pathlib import Path
from typing import Literal

from platformdirs import user_cache_path
from pydantic import Field, SecretStr, field_validator, model_validator

from services.executor.debug.slow_steps import SlowSteps
from services.executor.engine.draft_limit import most_drafts
from services.executor.kv_cache.dtypes import KvDType, parse_layers
from shared.config import CommonSettings
from shared.models import ReasoningParser, ToolParser

DType = Literal["auto", "bf16", "fp32"]
WeightDType = Literal["auto", "bf16", "fp8", "int8"]


class ExecutorSettings(CommonSettings):
    """One executor group: a tensor-parallel ring of `tp` ranks that serves one model."""

    model: str = ""
    """Directory, GGUF file or hub name of the model."""
    served_model_name: str = ""
    """Name that clients use; empty: made from `model`."""
    group: str = ""
    """Name of the group; empty: the instance's name."""
    tp: int = Field(default=1, ge=1, le=64)
    """Ranks of the ring (tensor parallelism)."""
    dtype: DType = "auto"
    """Of weights and computation; `auto`: bf16 where the hardware computes it fast, else fp32."""
    weight_dtype: WeightDType = "auto"
    """Of the linear layers' weights in memory: `auto` and `bf16` (as the model computes), or quantised to `fp8` or
    `int8` as they are loaded, half the bytes. For GPUs. Embedding, head and norms stay as they are."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    engine: Literal["torch", "stub"] = "torch"
    """`stub` computes nothing at a set speed, for tests and benchmarks of the control plane; of a `model` it has
    the tokenizer alone."""
    model_cache: Path = Field(default_factory=lambda: user_cache_path("ryzanstein") / "models")
    """Where converted models are kept."""
    weight_cache_bytes: int = Field(default=16 << 30, ge=0)
    """Most bytes on disk, in `model_cache`, for weights as the native kernels for CPUs read them: what a start of a
    model that was served before reads in place of building it. Those unused for the longest time make room. 0: none."""
    context_length: int = Field(default=0, ge=0)
    """Most tokens of one sequence; 0: what the model was made for."""
    max_sequences: int = Field(default=64, ge=1)
    """Most sequences in one step."""
    max_batch_tokens: int = Field(default=512, ge=1)
    """Token budget of one step: long prompts are prefilled in chunks of at most this."""
    max_waiting: int = Field(default=1024, ge=1)
    """Most accepted sequences that wait for the batch; more are refused for the time being. Those of the batch
    lane keep no others out."""
    speculation: str = "auto"
    """Tokens that a step checks ahead per sequence where the text repeats itself: `auto` (as many as pay),
    `off`, or the most there may be. It changes the speed, never the text."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """On GPUs, decode steps as CUDA graphs, captured at start-up for batches of up to `max_sequences`: `auto` (where
    the model's decoder can), or `off`. They change the speed, never the tokens."""
    cuda_graphs_memory: int = Field(default=1 << 30, ge=1)
    """Most bytes of GPU memory that these graphs take; larger batches are captured first."""
    batch_invariant: bool = False
    """On GPUs, every row of a step has the bits that it would have alone, so that a text does not depend on what is
    computed beside it, on prefix hits, or on which ring computes it: products, attention and sums over ranks in one
    order. Slower (docs/gpu.md). The native kernels for CPUs always compute so."""
    warm_up: Literal["auto", "off"] = "auto"
    """On GPUs with Triton, steps of every kind before the ring is ready, which compile their kernels: seconds
    for each of them the first time, briefly once Triton has them in its cache. `off`: the first requests wait."""
    lookahead: Literal["auto", "on", "off"] = "auto"
    """Whether a step may be launched before the tokens of the one before it are known, so that planning and
    publishing cost no time between steps; `auto`: where a GPU computes. It changes the speed, never the text."""
    block_size: int = Field(default=16, ge=1)
    """Tokens per KV block."""
    kv_dtype: KvDType = "auto"
    """Of full KV blocks: `bf16` (as the model computes them), or compressed to `fp8` or `int8`; `auto`: int8
    where that is read as fast (by the native kernels, and on GPUs with Triton in bf16), else bf16."""
    kv_dtype_layers: str = ""
    """Layers that differ from `kv_dtype`, such as "0=bf16,-1=bf16"; negative ones count from the last."""
    kv_memory: int = Field(default=0, ge=0)
    """Bytes for the KV cache of each rank; 0: from the free memory."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that may be in use once the KV cache stands, where `kv_memory` is not set. What steps
    are estimated to need is left free in any case."""
    kv_host_memory: int = Field(default=0, ge=0)
    """Bytes of host memory per rank for evicted KV blocks of sessions; 0: none. For GPUs, which have it pinned at
    start: on a CPU the same bytes are worth more as `kv_memory`."""
    kv_disk_memory: int = Field(default=0, ge=0)
    """Bytes on disk per rank for evicted KV blocks of sessions; 0: none."""
    kv_disk_directory: Path | None = None
    """Where `kv_disk_memory` goes, to files that end with their process; not set: the directory for temporary
    files, which is no use where that is in memory."""
    kv_session_ttl: float = Field(default=900.0, ge=0)
    """Seconds after its last turn for which a session's KV blocks are evicted after others'; 0: none."""
    replicas_on_host: int = Field(default=1, ge=1)
    """Executor groups that share this host's memory, which each then takes its part of for the KV cache."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of each rank; 0: the cores shared out among the ranks."""
    fork_server: Literal["auto", "off"] = "auto"
    """A process that has done the imports of a rank and forks ranks, so that a ring is up again in a second: `auto`
    (on Linux), or `off`, which starts each rank as a new Python. It takes some 25 MB that ranks do not share."""
    pin_threads: bool = True
    """Keeps each of these threads on a core of its own, where the ring has as many as there are cores."""
    collectives: Literal["auto", "shm", "gloo", "nccl"] = "auto"
    """How the ranks of a ring add up tensors; `auto`: on GPUs NCCL, and symmetric memory for small ones, shared memory
    on CPUs. `nccl`: NCCL alone, with one rank too. `gloo` uses sockets: slower, for hosts where processes may not share
    memory or where there is no C compiler."""
    ring_host: str = "127.0.0.1"
    """Address on which the ranks of the ring meet, and at which other rings' ranks reach them for a hand-over;
    `auto`: the one that this host's name stands for, as in a container."""
    hung_after: float = Field(default=3.0, ge=1.0)
    """Seconds without progress, with work in flight, after which the ring is taken down and up."""
    start_timeout: float = Field(default=1800.0, gt=0)
    """Seconds that a ring may take to load."""
    drain_grace: float = Field(default=10.0, ge=0)
    """Seconds that running generations get to finish at shutdown; the rest continue elsewhere."""
    handover_timeout: float = Field(default=10.0, ge=0)
    """Seconds after the last generation has ended in which a ring that leaves gives its sessions' KV blocks to its
    peers; 0: it does not."""
    handover_port: int = Field(default=0, ge=0, le=65535 - 64)
    """Port on `ring_host` at which rank 0 takes over KV blocks, rank r at that plus r; 0: the system chooses."""
    tool_parser: ToolParser = "auto"
    """How the model writes tool calls: `auto` (as its chat template shows), `none` (tools are refused), or a parser."""
    reasoning_parser: ReasoningParser = "auto"
    """How the model marks its reasoning: `auto` (as its chat template shows), `none` (it is part of the answer), or a
    parser."""
    slow_step: str = "auto"
    """Steps that are logged as slow: `auto` (4 times what such a step usually takes, and at least 250 ms), `off`,
    another factor such as `3x`, or a time such as `0.5s` or `200ms`."""
    dump_directory: Path | None = None
    """Where a dump is written before a ring that is hung is taken down; not set: `ryzanstein-dumps` in the directory
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
    stub_fault: Literal["", "crash", "exit", "hang", "error"] = ""
    """Stub engine, for tests: what becomes of a step that computes token 1."""
    nnodes: int = Field(default=1, ge=1, le=64)
    """Hosts over which the ring is spread, `tp / nnodes` ranks on each."""
    node_rank: int = Field(default=0, ge=0)
    """This host's place among them: 0 has the leader and speaks for the ring; the others start their ranks when it
    says so."""
    master_addr: str = ""
    """Address of host 0, as the others reach it."""
    master_port: int = Field(default=29500, ge=1, le=65535)
    """Port of host 0 to which the other hosts come."""
    ring_secret: SecretStr = SecretStr("")
    """What the hosts of one ring know, and nobody else."""

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
                f"this host's name {name!r} stands for no address ({error.strerror or error}); give the address itself"
            ) from None

    @model_validator(mode="after")
    def _check_nodes(self) -> "ExecutorSettings":
        if self.nnodes == 1:
            if self.node_rank:
                raise ValueError(
                    "node_rank says that there are other hosts; set nnodes, master_addr and ring_secret too"
                )
            return self
        if self.tp % self.nnodes:
            raise ValueError(
                f"tp {self.tp} does not divide by nnodes {self.nnodes}: each host has equally many ranks"
            )
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank {self.node_rank} is not below nnodes {self.nnodes}; count from 0")
        if not self.master_addr:
            raise ValueError("master_addr is not set: it is the address of host 0, as the others reach it")
        if not self.ring_secret.get_secret_value():
            raise ValueError(
                "ring_secret is not set: hosts that are to be one ring must know the same secret"
            )
        return self

    @field_validator("speculation")
    @classmethod
    def _check_speculation(cls, text: str) -> str:
        most_drafts(text)
        return text

    @field_validator("slow_step")
    @classmethod
    def _check_slow_step(cls, text: str) -> str:
        SlowSteps.of(text)
        return text

    @field_validator("kv_dtype_layers")
    @classmethod
    def _check_layers(cls, text: str) -> str:
        parse_layers(text)
        return text
