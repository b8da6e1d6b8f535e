"""The simulator at a small scale: every request ends once, and our classes keep their promises."""

import json
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.harness import program
from benchmarks.simulation.__main__ import main, simulate
from benchmarks.simulation.virtual_cluster import Cluster, Scale, variation, zipf

SMALL = Scale(groups=40, sessions=3000, requests=9000, schedulers=3, tenants=50, slots=16, failures=2)


def test_placement_balances_sticks_and_survives_losses() -> None:
    result = simulate(SMALL, 1)
    assert result.requests == SMALL.requests
    assert result.failovers > 0
    assert result.sticky_hits > 0.95
    assert result.imbalance < 0.10, "few sequences in all: chance alone makes half of it"
    assert 0.6 < result.load < 0.8


def test_more_than_there_is_room_for_waits_and_is_answered() -> None:
    scale = Scale(groups=3, sessions=300, requests=400, schedulers=2, tenants=3, slots=2, load=1.9, failures=1)
    cluster = Cluster(scale, 0)
    measured = cluster.run()
    assert measured.ended == scale.requests
    assert max(measured.first_token) > 1.0
    assert all(ring.sequences <= scale.slots + 8 + 2 for ring in cluster.rings), "the rest waits in the schedulers"


def test_the_same_seed_gives_the_same_run() -> None:
    scale = Scale(groups=5, sessions=100, requests=400, slots=4, failures=1)
    one, two = simulate(scale, 3), simulate(scale, 3)
    assert (one.imbalance, one.first_token_p99, one.sticky_hits) == (
        two.imbalance,
        two.first_token_p99,
        two.sticky_hits,
    )


def test_zipf_and_variation() -> None:
    import random

    rng = random.Random(0)
    drawn = [zipf(rng, 100, 0.5) for _ in range(20_000)]
    assert set(drawn) == set(range(100))
    assert 0.45 < sum(number < 25 for number in drawn) / len(drawn) < 0.55, "a quarter has half of it"
    assert variation([1, 3]) == 0.5
    assert variation([2.0, 2.0]) == variation([]) == variation([0]) == 0.0


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    app, out = program(main), tmp_path / "out.json"
    sizes = ["--groups", "4", "--sessions", "50", "--requests", "200", "--failures", "1", "--slots", "4"]
    found = CliRunner().invoke(app, [*sizes, "--json", str(out)])
    assert found.exit_code == 0, found.output
    assert "imbalance" in found.output
    report = json.loads(out.read_bytes())
    assert report["result"]["requests"] == 200
    assert report["scale"]["groups"] == 4
    assert CliRunner().invoke(app, ["--requests", "5"]).exit_code == 2
