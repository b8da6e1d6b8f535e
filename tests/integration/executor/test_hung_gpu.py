"""A ring whose GPUs hang, or are lost, is taken down and comes up again. The GPUs are doubles; the rest is real."""

import os
from pathlib import Path

import pytest

from services.executor.worker.stub import stub_token
from shared.config import CommonSettings
from shared.messages import DispatchBatch, DispatchReply, GenerationRequest, Heartbeat, SamplingParams, TokenFrame
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.integration.executor.reader import Reader
from tests.processes import service_process


async def dispatch(bus: Bus, name: str, max_tokens: int) -> None:
    sampling = SamplingParams(seed=1)
    request = GenerationRequest(name, name, "stub", "me", [1, 2, 3], max_tokens, sampling=sampling)
    reply = await bus.request(subjects.dispatch("g"), DispatchBatch([request]), DispatchReply, timeout=30)
    assert reply.accepted == [name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        (-1, r"is hung in step"),
        (1, r"Fatal CUDA error on rank 1 of group g (CUDA error: uncorrectable ECC error encountered)"),
    ],
    ids=["hung", "lost"],
)
async def test_a_ring_whose_gpus_do_not_go_on_is_restarted(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, lost: int, reason: str
) -> None:
    """No launch fails when a kernel hangs; and when rank 1's device is lost, rank 0 waits for its own for ever."""
    reader = Reader()
    await bus.subscribe(subjects.tokens("me"), TokenFrame, reader.on_frame)
    faults = tmp_path / "faults"
    faults.write_text("0 -1")
    arguments = ("--engine", "stub", "--group", "g", "--hung-after", "1", "--tp", "2", "--stub-step-ms", "2")
    async with service_process(
        bus,
        nats_settings,
        "tests.integration.executor.gpu_executor",
        tmp_path,
        *arguments,
        instance="executor-test",
        variables={"RYZANSTEIN_TEST_GPU": str(faults)},
    ) as process:
        before = (await process.wait_ready()).group
        await dispatch(bus, "a", 5000)
        await reader.some()
        now = tmp_path / "now"
        now.write_text(f"{before.epoch} {lost}")
        now.replace(faults)

        def is_back(beat: Heartbeat) -> bool:
            group = beat.group
            return group is not None and group.state == "ready" and group.epoch > before.epoch

        after = (await process.wait_for(is_back)).group
        assert after is not None
        assert reason in process.log.read_text()
        for old in before.ranks:
            with pytest.raises(ProcessLookupError):
                os.kill(old.pid, 0)
        await dispatch(bus, "b", 8)
        tokens, last = await reader.finish("b")
        assert tokens == [stub_token(1, position) for position in range(8)]
        assert last.finish == "length"
