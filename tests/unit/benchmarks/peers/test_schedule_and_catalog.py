"""Who is measured when, and how each server is started."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.errors import BenchError
from benchmarks.peers.__main__ import random_model
from benchmarks.peers.catalog import DEFAULT, OURS, PEERS, Place, choose_peers, fingerprint
from benchmarks.peers.rounds import gguf_path, prompt_seed, schedule
from benchmarks.peers.source_build import commands
from benchmarks.serve.workloads import WORKLOADS

PLACE = Place(
    model=Path("/models/m"),
    weights=Path("/peers/m.gguf"),
    venv=Path("/peers/venv"),
    state=Path("/peers/state"),
    port=4711,
    threads=2,
    slots=64,
    kept=Path("/peers/kept"),
)
ALL = list(WORKLOADS.values())


def test_rounds_are_interleaved() -> None:
    peers = choose_peers("vllm,openvino")
    steps = schedule(peers, ALL, 2)
    assert [(step.round, step.peer.name) for step in steps] == [
        (0, "vllm"),
        (0, "openvino"),
        (1, "vllm"),
        (1, "openvino"),
    ]
    assert all(list(step.workloads) == ALL for step in steps)


def test_llama_cpp_is_started_again_for_more_slots() -> None:
    steps = schedule(choose_peers("llama.cpp"), ALL, 1)
    assert [(step.slots, [each.name for each in step.workloads]) for step in steps] == [
        (16, ["W1", "W2", "W4", "W4s"]),
        (64, ["W3"]),
    ]


@given(
    names=st.lists(st.sampled_from(sorted(PEERS)), min_size=1, unique=True),
    workloads=st.lists(st.sampled_from(ALL), min_size=1, unique=True),
    clients=st.integers(1, 200),
    rounds=st.integers(1, 4),
)
def test_every_peer_plays_every_workload_once_a_round(
    names: list[str], workloads: list[object], clients: int, rounds: int
) -> None:
    load = [replace(each, clients=clients) for each in workloads]  # type: ignore[type-var]
    steps = schedule(choose_peers(",".join(names)), load, rounds)
    played = [(step.round, step.peer.name, each.name) for step in steps for each in step.workloads]
    assert sorted(played) == sorted((at, n, each.name) for at in range(rounds) for n in names for each in load)
    assert all(step.slots >= each.clients for step in steps for each in step.workloads)


def test_prompts_differ_by_round_and_workload_and_by_nothing_else() -> None:
    seeds = {prompt_seed(7, at, name) for at in range(10) for name in WORKLOADS}
    assert len(seeds) == 10 * len(WORKLOADS)


@pytest.mark.parametrize("name", sorted(PEERS))
def test_every_server_listens_on_loopback_with_the_threads_asked_for(name: str) -> None:
    place = PLACE if PEERS[name].weights else replace(PLACE, weights=None)
    launch = PEERS[name].launch(place)
    words = [*launch.command, *launch.variables.values()]
    assert "4711" in launch.command
    assert "2" in words
    if not name.startswith("openvino"):  # the shim knows no other address
        assert launch.command[launch.command.index("--host") + 1] == "127.0.0.1"
    source = place.weights or place.model
    assert str(source) in launch.command


def test_vllm_is_started_with_libraries_only_where_there_are_some() -> None:
    assert "LD_PRELOAD" not in PEERS["vllm"].launch(PLACE).variables
    place = replace(PLACE, preload=(Path("/lib/a.so"), Path("/lib/b.so")))
    assert PEERS["vllm"].launch(place).variables["LD_PRELOAD"] == "/lib/a.so:/lib/b.so"


def test_three_stand_around_one_vllm() -> None:
    bare, dynamo, ours = (PEERS[name] for name in ("vllm-0.31", "dynamo", "ryzanstein-vllm-0.31"))
    assert bare.environment == dynamo.environment == ours.environment
    launch = ours.launch(replace(PLACE, weights=None))
    assert launch.command[0] == sys.executable
    assert launch.command[launch.command.index("--engine-python") + 1] == PLACE.python
    assert launch.variables["RYZANSTEIN_CONTEXT_LENGTH"] == "2048"
    assert not {"RYZANSTEIN_DEVICE", "RYZANSTEIN_THREADS"} & launch.variables.keys(), "vLLM has settings of its own"


def test_ours_runs_in_this_environment() -> None:
    assert PEERS[OURS].environment is None
    command = PEERS[OURS].launch(replace(PLACE, venv=None, weights=None)).command
    assert command[1:5] == ("-m", "services.cli", "up", "--no-smoke-test")


def test_ours_are_held_against_peers_of_as_many_bits() -> None:
    rows = {peer.name: peer for peer in PEERS.values() if peer.against}
    assert {peer.name for peer in rows.values() if peer.environment} == {"ryzanstein-vllm", "ryzanstein-vllm-0.31"}
    assert set().union(*(peer.against for peer in rows.values())) <= PEERS.keys()
    assert [peer.title for peer in PEERS.values() if peer.name == "llama.cpp-q4_k_m"] == ["llama.cpp llama-server"]
    against = rows["ryzanstein-plain-q4_k_m"].against
    assert {PEERS[each].dtype for each in against} == {"Q4_K_M", "Q4_K_M, u8 KV", "bf16"}


def test_quantized_rows_get_a_file() -> None:
    packed = PEERS["ryzanstein-plain-q4_k_m"].launch(replace(PLACE, venv=None))
    assert packed.command[packed.command.index("--model") + 1] == "/peers/m.gguf"
    assert packed.variables["RYZANSTEIN_SPECULATION"] == "off"
    assert packed.variables["RYZANSTEIN_MODEL_CACHE"] == "/peers/kept"


@pytest.mark.parametrize("level", ["avx2", "avxvnni"])
def test_what_computes_with_older_instructions_is_told_so(level: str) -> None:
    place = replace(PLACE, venv=None)
    ours = PEERS[f"ryzanstein-plain-{level}-q8_0"]
    assert ours.launch(place).variables["RYZANSTEIN_CPU_LEVEL"] == level
    assert ours.against == (f"llama.cpp-{level}-q8_0",)
    assert "RYZANSTEIN_CPU_LEVEL" not in PEERS["ryzanstein-plain-q8_0"].launch(place).variables
    native, plain = (PEERS[name].environment for name in ("llama.cpp", f"llama.cpp-{level}"))
    assert native is not None
    assert plain is not None
    assert "GGML_NATIVE" in plain.variables["CMAKE_ARGS"]
    assert ("AVX_VNNI" in plain.variables["CMAKE_ARGS"]) == (level == "avxvnni")
    assert "GGML_NATIVE" not in native.variables["CMAKE_ARGS"]
    assert fingerprint(native) != fingerprint(replace(native, variables=plain.variables))


def test_releases_are_pinned() -> None:
    for peer in PEERS.values():
        for step in peer.environment.steps if peer.environment else ():
            if step[:3] == ("-m", "pip", "install"):
                assert all("==" in word for word in step[3:] if not word.startswith("-"))


def test_what_has_no_releases_is_built_at_a_fixed_commit() -> None:
    environment = PEERS["ik_llama.cpp-q4_0"].environment
    assert environment is not None
    _, (script, url, commit, folder, target, *options) = environment.steps
    assert Path(script).is_file()
    assert (commit, len(commit)) == (environment.commit, 40)
    run = commands(url, commit, Path("/venv") / folder, target, options)
    assert ["git", "-C", "/venv/sources", "fetch", "--quiet", "--depth", "1", url, commit] in run
    assert all(option in run[-2] for option in options)
    binary = PEERS["ik_llama.cpp"].launch(replace(PLACE, venv=Path("/venv"))).command[0]
    assert binary == f"{run[-1][2]}/bin/{run[-1][-1]}"


def test_peers_are_chosen_by_name() -> None:
    assert [peer.name for peer in choose_peers(",".join(DEFAULT))] == list(DEFAULT)
    assert [peer.name for peer in choose_peers(" OpenVINO,vllm,openvino ")] == ["openvino", "vllm"]
    with pytest.raises(BenchError, match="There is no peer 'ollama': choose from"):
        choose_peers("ollama")
    with pytest.raises(BenchError, match="names nobody"):
        choose_peers(" , ")


def test_other_weights_get_another_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = gguf_path(tmp_path, tmp_path, "bf16")
    os.utime(tmp_path / "config.json", (4e9, 4e9))
    assert gguf_path(tmp_path, tmp_path, "bf16") != before
    assert gguf_path(tmp_path, tmp_path, "f16") != gguf_path(tmp_path, tmp_path, "bf16")


def test_a_random_model_is_made_once_with_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    made = random_model("tiny", tmp_path, tmp_path / "work")
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {file.name for file in made.iterdir()}
    assert list(made.parent.iterdir()) == [made]
    written = made.stat().st_mtime_ns
    assert random_model("tiny", tmp_path, tmp_path / "work") == made
    assert made.stat().st_mtime_ns == written


def test_a_shape_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--random '64,2' is not hidden,heads"):
        random_model("64,2", tmp_path, tmp_path)
