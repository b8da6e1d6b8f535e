"""Ranks that are killed in the middle of their load and started again hold the right keys and values.

After the second life each rank's every block is compared with what transformers computes for the tokens
that the leader believes to be in it, also those that the first life had written to disk.
"""

import asyncio
import signal
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.executor.core.sharding import ShardLayout
from services.executor.ipc.board import RingBoard
from services.executor.model.loading.loader import load_config
from shared.messages import GenerationRequest, SamplingParams, TokenEntry
from tests.integration.executor.ring_member import Known, Turn
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.model.tiny import make_model

BLOCK = 4
CONTEXT = 64
LAYERS = 3
KILLED_AFTER = 30
"""Steps."""


class Life:
    """The ranks of one ring, from their start to their end."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory = directory
        self.ranks = ranks
        self.board = RingBoard(directory / "board", ranks, create=True)
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        for rank in range(self.ranks):
            self.processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "tests.integration.executor.ring_member",
                    str(rank),
                    str(self.directory),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
            )
        rendezvous = await self._line()
        for follower in self.processes[1:]:
            assert follower.stdin is not None
            follower.stdin.write(rendezvous)

    async def entries(self) -> list[TokenEntry] | None:
        """Of the next step; None when the load is done."""
        line = await self._line()
        return msgspec.json.decode(line, type=list[TokenEntry]) if line else None

    async def end(self) -> list[int]:
        return [await asyncio.wait_for(process.wait(), 60) for process in self.processes]

    async def kill(self, rank: int) -> None:
        """One rank dies, and the others are taken down, as the supervisor does."""
        self.processes[rank].send_signal(signal.SIGKILL)
        await self.processes[rank].wait()
        for process in self.processes:
            if process.returncode is None:
                process.kill()
        await self.end()

    async def _line(self) -> bytes:
        stdout = self.processes[0].stdout
        assert stdout is not None
        return await asyncio.wait_for(stdout.readline(), 60)


def turns() -> list[Turn]:
    """Six sessions of three turns: together twice what the cache holds."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 131, (count,), generator=generator).tolist()

    beginning = tokens(6)
    return [
        Turn(
            GenerationRequest(
                str(n),
                "r",
                "m",
                "c",
                beginning + tokens(5 + n),
                6,
                SamplingParams(temperature=0.0),
                session=str(n),
            ),
            [tokens(6), tokens(5)],
        )
        for n in range(6)
    ]


def settings(model: Path, directory: Path, kv_dtype: str, blocks: int) -> dict[str, object]:
    block_bytes = LAYERS * 2 * 2 * BLOCK * 16 * 4  # rank 0 has two of the three KV heads
    return {
        "model": str(model),
        "tp": 2,
        "dtype": "fp32",
        "device": "cpu",
        "threads": 1,
        "block_size": BLOCK,
        "context_length": CONTEXT,
        "max_sequences": 3,
        "max_batch_tokens": 16,
        "kv_dtype": kv_dtype,
        "lookahead": "on" if kv_dtype == "int8" else "off",
        "kv_memory": blocks * block_bytes,
        "kv_host_memory": 4 * block_bytes,
        "kv_disk_memory": 200 * block_bytes,
        "kv_disk_directory": str(directory),
    }


def continued(turn: Turn, tokens: dict[str, list[int]]) -> Turn:
    """The request as the gateway hands it in again: what it has received so far goes with it."""
    generated = tokens.get(turn.request.generation_id, [])
    if len(generated) == turn.request.max_tokens:
        generated = generated[:-1]  # let it end once more, so that its session goes on
    request = msgspec.structs.replace(turn.request, attempt=1, generated=generated)
    return Turn(request, turn.later)


@pytest.mark.parametrize(
    ("killed", "kv_dtype", "blocks", "tolerance"),
    in_lanes([(1, "bf16", 26, 1e-4), (0, "int8", 23, 0.08)], (), [(0, "int8", 23, 0.08)]),
)
async def test_every_rank_holds_what_the_leader_believes(
    tmp_path: Path, killed: int, kv_dtype: str, blocks: int, tolerance: float
) -> None:
    model = make_model(tmp_path / "model", "llama")
    tokens: dict[str, list[int]] = {}
    load = turns()
    for life in range(2):
        directory = tmp_path / f"life-{life}"
        directory.mkdir()
        (directory / "settings.json").write_bytes(
            msgspec.json.encode(settings(model, tmp_path / "kv", kv_dtype, blocks))
        )
        (directory / "turns.json").write_bytes(
            msgspec.json.encode([continued(turn, tokens) if life else turn for turn in load])
        )
        ring = Life(directory, 2)
        await ring.start()
        steps = 0
        while (entries := await ring.entries()) is not None:
            for entry in entries:
                known = tokens.setdefault(entry.generation_id, [])
                del known[entry.position :]
                known += entry.tokens
            steps += 1
            if life == 0 and steps == KILLED_AFTER:
                await ring.kill(killed)
                break
    assert await ring.end() == [0, 0]
    answered = {turn.request.generation_id + "+" * n for turn in load for n in range(3)}
    assert {name for name, known in tokens.items() if len(known) == 6} == answered
    known = msgspec.json.decode((directory / "known.json").read_bytes(), type=Known)
    saves, compressions, restores = known.copies
    assert saves
    assert restores
    assert bool(compressions) == (kv_dtype == "int8")
    assert known.recovered, "what the first life had written is there"
    assert len(known.blocks) >= 16
    compare(model, directory, known, tolerance)


def compare(model: Path, directory: Path, known: Known, tolerance: float) -> None:
    """Every rank's blocks against transformers' own keys and values of the rank's heads."""
    reference = AutoModelForCausalLM.from_pretrained(
        str(model), attn_implementation="eager", dtype=torch.float32
    )
    ranks = [torch.load(directory / f"rank-{rank}.pt") for rank in range(2)]
    layouts = [ShardLayout.from_config(load_config(model), 2, rank) for rank in range(2)]
    assert [layout.kv_heads.size for layout in layouts] == [2, 2]
    for block, tokens in known.blocks.items():
        with torch.inference_mode():
            cache = reference(torch.tensor([tokens]), use_cache=True).past_key_values
        for layers, layout in zip(ranks, layouts, strict=True):
            heads = slice(layout.kv_heads.start, layout.kv_heads.start + layout.kv_heads.size)
            for (keys, values), truth in zip(layers, cache.layers, strict=True):
                for mine, whole in ((keys[block], truth.keys), (values[block], truth.values)):
                    expected = whole[0, heads, -BLOCK:]
                    error = (mine - expected).abs().max()
                    assert error <= tolerance * expected.abs().max(), f"block {block} is not its tokens'"
