"""A group with a part of its weights in memory: the same text as with all of them, and what is read is told."""

from pathlib import Path

import pytest

from services.executor.core.engine import RING
from services.executor.native.library import why_not
from shared.config import CommonSettings
from shared.errors import ConfigurationError
from shared.messages import GroupTraits, SamplingParams
from shared.nats.bus import Bus
from tests.integration.executor.rings import make_served_model, request_of, rings
from tests.unit.executor.worker.test_weights import share_of


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")
async def test_a_group_streams_weights_and_says_so(bus: Bus, nats_settings: CommonSettings, tmp_path: Path) -> None:
    model = make_served_model(tmp_path / "model", head_dim=32, num_hidden_layers=6)
    cache = tmp_path / "packed"
    kept = {"weight_cache_directory": cache, "weight_cache_bytes": 1 << 30, "kv_memory": 4 << 20}
    with pytest.raises(ConfigurationError) as refused:
        share_of(model, weights_memory=1, dtype="bf16", **kept)
    least = int(refused.value.message.split(" at least")[0].split()[-1])

    texts = []
    for group, memory in (("part", least), ("all", 0)):
        async with rings(bus, nats_settings, tmp_path) as house:
            own = ("--weights-memory", str(memory), "--weight-cache-directory", str(cache))
            own += ("--weight-cache-bytes", str(1 << 30), "--dtype", "bf16")
            await house.begin(group, model, *own)
            beat = (await house.processes[group].wait_ready()).group
            assert beat.traits == GroupTraits(["window"], engine=RING)
            assert (beat.streamed is not None) is (group == "part")
            if beat.streamed is not None:
                assert 0 < beat.streamed.memory <= least
                assert beat.streamed.per_step > 0
                assert "weights_streamed" in house.processes[group].log.read_text()
            sampling = SamplingParams(temperature=1.0, seed=3)
            one = request_of(group, 1, 40, max_tokens=24, sampling=sampling)
            await house.hand_in(group, [one])
            texts += await house.texts([one])
    assert texts[0] == texts[1]
    assert texts[0][0]
