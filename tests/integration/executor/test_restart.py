"""A real ring whose rank is killed: it comes back by the fork server and from the weight cache, with the same text."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from services.executor.native.library import why_not
from shared.messages import Heartbeat, SamplingParams
from tests.integration.executor.rings import Rings, make_served_model, request_of

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forked ranks are for Linux"),
]

GROUP = "g"
TP = 2


class Restarted:
    """A ring of two ranks, killed and waited for."""

    def __init__(self, house: Rings, cache: Path) -> None:
        self._house = house
        self.cache = cache
        self._asked = 0

    async def begin(self, model: Path) -> None:
        variables = {
            "RYZANSTEIN_WEIGHT_CACHE_BYTES": str(1 << 30),
            "RYZANSTEIN_MODEL_CACHE": str(self.cache.parent / "read-only"),
            "RYZANSTEIN_WEIGHT_CACHE_DIRECTORY": str(self.cache),
        }
        options = ("--tp", str(TP), "--dtype", "bf16", "--collectives", "shm")
        await self._house.begin(GROUP, model, *options, variables=variables, forked=False)
        await self._house.ready(GROUP, timeout=90)

    @property
    def executor(self) -> psutil.Process:
        return psutil.Process(self._house.processes[GROUP].process.pid)

    @property
    def ranks(self) -> list[psutil.Process]:
        """Those of the newest beat that names some."""
        beats = self._house.processes[GROUP].beats
        beat = next(beat.group for beat in reversed(beats) if beat.group is not None and beat.group.ranks)
        return [psutil.Process(rank.pid) for rank in beat.ranks]

    @property
    def fork_servers(self) -> list[psutil.Process]:
        ranks = {rank.pid for rank in self.ranks}
        return [child for child in self.executor.children() if child.pid not in ranks]

    def logged(self, event: str) -> list[dict[str, Any]]:
        # Two ranks may have written at once, and ended their lines afterwards.
        lines = self._house.processes[GROUP].log.read_text().replace("}{", "}\n{").splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in said if line["event"] == event]

    async def until(self, event: str, count: int) -> None:
        """Until `event` has been logged so many times; the lines of a rank come in any order."""
        for number in range(count):
            await self._house.until_logged(GROUP, f'"event": "{event}"')
            while len(self.logged(event)) <= number:
                await self._house.processes[GROUP].wait_for(lambda beat: True)

    async def kill_a_rank(self) -> None:
        """And waits until the ring is back."""
        before = self.ranks
        epoch = self._epoch
        before[-1].send_signal(signal.SIGKILL)

        def is_back(beat: Heartbeat) -> bool:
            return beat.group is not None and beat.group.state == "ready" and beat.group.epoch > epoch

        await self._house.processes[GROUP].wait_for(is_back, timeout=90)
        assert not {rank.pid for rank in before} & {rank.pid for rank in self.ranks}

    @property
    def _epoch(self) -> int:
        beats = self._house.processes[GROUP].beats
        return max(beat.group.epoch for beat in beats if beat.group is not None)

    async def text(self) -> list[int]:
        """Of the same prompt, each time under another name."""
        self._asked += 1
        sampling = SamplingParams(temperature=0.0)
        request = request_of(GROUP, 1, 40, max_tokens=12, sampling=sampling)
        request = msgspec.structs.replace(request, generation_id=f"{GROUP}-{self._asked}")
        await self._house.hand_in(GROUP, [request])
        [(tokens, _)] = await self._house.texts([request])
        return tokens


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_served_model(tmp_path / "model", head_dim=32)


@pytest.mark.slow
async def test_a_ring_comes_back_by_what_was_kept(house: Rings, tmp_path: Path, model: Path) -> None:
    ring = Restarted(house, tmp_path / "cache" / ".packed")
    await ring.begin(model)
    text = await ring.text()
    assert len(text) == 12
    await ring.until("weights_kept", TP)
    files = sorted(ring.cache.glob("*.packed"))
    assert len(files) == TP
    [server] = ring.fork_servers
    assert "services.executor.supervisor.ranks.fork_server" in server.cmdline()
    assert all("services.executor.rank" in rank.cmdline() for rank in ring.ranks)
    assert {rank.ppid() for rank in ring.ranks} == {ring.executor.pid}

    await ring.kill_a_rank()
    assert ring.fork_servers == [server], "one for all ranks, and the same as before"
    weights = [line["weights"] for line in ring.logged("computing_with_native_kernels")]
    assert weights == ["packed here"] * TP + ["cached"] * TP
    assert await ring.text() == text

    # What is on the disk is damaged, and there is no fork server.
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 1
        file.write_bytes(content)
    server.kill()
    await ring.kill_a_rank()
    weights = [line["weights"] for line in ring.logged("computing_with_native_kernels")]
    assert weights[2 * TP :] == ["packed here"] * TP
    assert len(ring.logged("weight_cache_damaged")) == TP
    assert await ring.text() == text
    [another] = ring.fork_servers
    assert another.pid != server.pid
    await ring.until("weights_kept", 2 * TP)

    # Nothing of a model stays in what forks.
    await ring.kill_a_rank()
    assert ring.fork_servers == [another]
    assert await ring.text() == text
    assert another.num_threads() == 1
    assert not [one for one in ring.executor.children() if one.status() == psutil.STATUS_ZOMBIE]
    assert not ring.logged("fork_server_not_used")
