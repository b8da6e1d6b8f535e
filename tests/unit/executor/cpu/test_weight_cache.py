"""Packed weights in files: what is read computes what was built, and what is not whole, ours or of now is not read."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.cpu import packed_file, weight_cache
from services.executor.cpu.weight_cache import CachedWeights, WeightCache
from services.executor.kv_cache.store import KvStore
from services.executor.model.layer_states import layer_states
from services.executor.model.model_facts import ModelFacts
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.backends.native_runner import native_runner
from services.executor.worker.runner import ModelRunner, widths_of
from shared.model_store import packed
from shared.model_store.packed import packed_files
from tests.unit.executor.cpu.test_decoder import runner_of
from tests.unit.executor.model.lanes import in_lanes, natively
from tests.unit.executor.model.ring import CPU, NUM_BLOCKS, NUM_SLOTS, mixed_script
from tests.unit.executor.model.tiny import make_model

pytestmark = natively

LIMIT = 1 << 30


def model_of(directory: Path, model_type: str = "llama", **changes: Any) -> Path:
    return make_model(directory, model_type, **{"head_dim": 32, **changes})


def built(directory: Path, weights: str = "") -> tuple[ModelFacts, ModelRunner]:
    runner = runner_of(directory, native=True, weights=weights)
    config = runner._model.config
    heads = HeadCounts.from_config(config)
    layout = ShardLayout.of(heads, 1, 0)
    widths = widths_of(runner._model)
    return ModelFacts(layer_states(config, layout), config.hidden_size, 64, heads, widths), runner


def cache_of(tmp_path: Path, model: Path, limit: int = LIMIT, rank: int = 0) -> WeightCache:
    return WeightCache(tmp_path / "cache", limit, model, (rank, 1, "bf16"))


def kept(tmp_path: Path, model: Path) -> Path:
    """The file of `model`, written."""
    facts, runner = built(model)
    before = set((tmp_path / "cache").glob("*.packed")) if (tmp_path / "cache").exists() else set()
    assert runner.packed is not None
    cache_of(tmp_path, model).keep(facts, runner.packed)
    [file] = set((tmp_path / "cache").glob("*.packed")) - before
    return file


def read(cache: WeightCache) -> CachedWeights | None:
    file = cache.find()
    return None if file is None else cache.read(file, 2, lambda done, total: None)


def logits(runner: ModelRunner) -> list[torch.Tensor]:
    found = [runner.forward(plan) for plan, _ in mixed_script()[1]]
    return [one for one in found if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize(
    ("model_type", "weights"),
    [
        *(("llama", "q4_k"), ("phi3", ""), ("qwen3_next", ""), ("deepseek_v2", "q4_k"), ("gemma4_text", "")),
        *in_lanes(
            [
                *((name, "") for name in ("llama", "qwen2", "qwen3", "gemma2", "granite", "granitemoehybrid")),
                *(("qwen2", "int4"), ("dots1", "q4_k"), ("qwen3_5_text", "q4_k"), ("gemma4_text", "q4_k")),
                ("deepseek_v3", ""),
            ],
            (),
        ),
    ],
)
def test_what_is_read_computes_what_was_built(
    tmp_path: Path, model_type: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_file, "_PIECE", 4096)  # many pieces, and tensors across their borders
    model = model_of(tmp_path / "model", model_type)
    facts, runner = built(model, weights)
    assert runner.packed is not None
    cache = cache_of(tmp_path, model)
    assert cache.find() is None
    cache.keep(facts, runner.packed)

    told: list[tuple[int, int]] = []
    file = cache.find()
    assert file is not None
    found = cache.read(file, 2, lambda *progress: told.append(progress))
    assert found.facts == facts
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] > 4096

    layout = ShardLayout.of(facts.heads, 1, 0)
    shape = runner._store.shape
    store = KvStore(shape, NUM_BLOCKS, CPU, num_slots=NUM_SLOTS if shape.slot else 0)
    again = native_runner(found.model, facts.widths, RunnerRequest(None, store, layout, SingleRank(), CPU, 2), "cached")
    for ours, theirs in zip(logits(again), logits(runner), strict=True):
        assert torch.equal(ours, theirs)


def test_every_damaged_byte_is_seen(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    file = kept(tmp_path, model)
    whole = file.read_bytes()
    places = [0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 400, *range(len(whole) - 40, len(whole), 3)]
    for place in places:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        file.chmod(0o600)
        with capture_logs() as log:
            assert read(cache_of(tmp_path, model)) is None, place
        assert [line["event"] for line in log] == ["weight_cache_damaged"]
        assert not file.exists(), "it is of no use to anybody"


def test_what_is_mapped_is_checked_as_what_is_read(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    file = kept(tmp_path, model)
    cache = cache_of(tmp_path, model)
    found, expected = cache.find(), read(cache)
    assert found is not None
    assert expected is not None
    mapped = cache.map(found, 2)
    assert torch.equal(mapped.model.head.packed, expected.model.head.packed)
    whole = file.read_bytes()
    file.unlink()  # who has it mapped keeps it
    file.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    file.chmod(0o600)
    damaged = cache.find()
    assert damaged is not None
    with capture_logs() as log:
        assert cache.map(damaged, 2) is None
    assert [line["event"] for line in log] == ["weight_cache_damaged"]
    assert not file.exists()
    assert torch.equal(mapped.model.head.packed, expected.model.head.packed)


@pytest.mark.parametrize("length", [0, 10, 23, 24, 1000, -1])
def test_a_file_that_is_cut_off_is_not_read(tmp_path: Path, length: int) -> None:
    model = model_of(tmp_path / "model")
    file = kept(tmp_path, model)
    file.write_bytes(file.read_bytes()[:length])
    assert read(cache_of(tmp_path, model)) is None


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_that_becomes_shorter_is_neither_mapped_nor_read(tmp_path: Path, mapped: bool) -> None:
    model = model_of(tmp_path / "model")
    file = kept(tmp_path, model)
    cache = cache_of(tmp_path, model)
    found = cache.find()
    assert found is not None
    os.truncate(file, 1000)
    assert (cache.map(found, 2) if mapped else cache.read(found, 2, lambda done, total: None)) is None


def test_other_weights_under_the_same_name(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    file = kept(tmp_path, model)
    assert read(cache_of(tmp_path, model)) is not None
    shutil.rmtree(model)
    model_of(tmp_path / "model", rms_norm_eps=1e-3)
    assert read(cache_of(tmp_path, model)) is None
    facts, runner = built(model)
    assert runner.packed is not None
    cache_of(tmp_path, model).keep(facts, runner.packed)
    assert [*(tmp_path / "cache").glob("*.packed")] == [file], "what is stale is replaced, not kept beside"
    found = read(cache_of(tmp_path, model))
    assert found.model.scalars.eps == pytest.approx(1e-3)


def test_a_file_of_the_model_that_is_written_to_later(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    kept(tmp_path, model)
    weights = model / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    assert cache_of(tmp_path, model).find() is None


def test_other_code_packs_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tmp_path / "model")
    kept(tmp_path, model)
    monkeypatch.setattr(weight_cache, "_of_code", lambda: ("another version",))
    assert cache_of(tmp_path, model).find() is None


def test_a_level_without_short_exponents_packs_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tmp_path / "model")
    kept(tmp_path, model)
    monkeypatch.setattr(weight_cache, "has_short_exponents", lambda library: False)
    assert cache_of(tmp_path, model).find() is None


def test_another_users_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tmp_path / "model")
    file = kept(tmp_path, model)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert cache_of(tmp_path, model).find() is None
    monkeypatch.undo()
    assert file.exists(), "it is not ours to delete"

    file.chmod(0o660)
    assert cache_of(tmp_path, model).find() is None
    file.chmod(0o600)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert cache_of(tmp_path, model).find() is None


def test_models_and_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    models = [model_of(tmp_path / name, rms_norm_eps=eps) for name, eps in (("a", 1e-5), ("b", 1e-3))]
    for model in models:
        kept(tmp_path, model)
    for model, eps in zip(models, (1e-5, 1e-3), strict=True):
        found = read(cache_of(tmp_path, model))
        assert found.model.scalars.eps == pytest.approx(eps)
        assert cache_of(tmp_path, model, rank=1).find() is None


def test_those_unused_for_the_longest_time_make_room(tmp_path: Path) -> None:
    models = [model_of(tmp_path / name) for name in "abc"]
    facts, runner = built(models[0])
    assert runner.packed is not None
    one = weight_cache._size_of(runner.packed)
    limit = 5 * one // 2  # a file is somewhat more than its weights
    for age, model in enumerate(models[:2]):
        cache_of(tmp_path, model, limit).keep(facts, runner.packed)
        [file] = (tmp_path / "cache").glob(f"{model.name}-*.packed")
        os.utime(file, (age, age))
    assert read(cache_of(tmp_path, models[0], limit)) is not None  # which makes it the youngest
    cache_of(tmp_path, models[2], limit).keep(facts, runner.packed)
    left = sorted(path.name[0] for path in (tmp_path / "cache").glob("*.packed"))
    assert left == ["a", "c"]


def test_what_nobody_needs_makes_room_first(tmp_path: Path) -> None:
    """Files of models that are gone, though they were used last; and what killed ranks have left, whatever the room."""
    models = [model_of(tmp_path / name) for name in "abc"]
    facts, runner = built(models[0])
    assert runner.packed is not None
    limit = 5 * weight_cache._size_of(runner.packed) // 2
    for age, model in enumerate(models[:2]):
        cache_of(tmp_path, model, limit).keep(facts, runner.packed)
        [file] = (tmp_path / "cache").glob(f"{model.name}-*.packed")
        os.utime(file, (age, age))
    shutil.rmtree(models[1])
    (tmp_path / "cache" / "killed-0.partial").write_bytes(bytes(1000))
    with (tmp_path / "cache" / "writing-0.partial").open("wb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        cache_of(tmp_path, models[2], limit).keep(facts, runner.packed)
        left = sorted(path.name.partition("-")[0] for path in (tmp_path / "cache").iterdir())
        assert left == ["a", "a", "c", "c", "writing"], "each file, and the link to its model"
        writing.truncate(limit)
        cache_of(tmp_path, models[2], limit, rank=1).keep(facts, runner.packed)
    assert [path.name[0] for path in (tmp_path / "cache").glob("*.packed")] == ["c"], "what is being written counts"


def test_a_file_of_an_earlier_version_is_linked_to_its_model_when_it_is_read(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    file = kept(tmp_path, model)
    file.with_suffix(".model").unlink()
    assert [found.needed for found in packed_files(file.parent)] == [False]
    assert read(cache_of(tmp_path, model)) is not None
    assert [(found.needed, found.model) for found in packed_files(file.parent)] == [(True, model.resolve())]


def test_more_than_there_may_be_is_not_kept(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    facts, runner = built(model)
    assert runner.packed is not None
    with capture_logs() as log:
        cache_of(tmp_path, model, limit=1000).keep(facts, runner.packed)
    [line] = [line for line in log if line["event"] == "weight_cache_write_failed"]
    assert "RYZANSTEIN_WEIGHT_CACHE_BYTES (1000)" in line["reason"]
    assert not [*(tmp_path / "cache").iterdir()]


def test_a_full_disk_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tmp_path / "model")
    facts, runner = built(model)
    assert runner.packed is not None
    monkeypatch.setattr(packed_file, "_write_all", _no_room)
    with capture_logs() as log:
        cache_of(tmp_path, model).keep(facts, runner.packed)
    assert [line["event"] for line in log] == ["weight_cache_write_failed"]
    assert cache_of(tmp_path, model).find() is None
    monkeypatch.undo()
    cache_of(tmp_path, model).keep(facts, runner.packed)  # what was begun is in nobody's way
    assert read(cache_of(tmp_path, model)) is not None


def _no_room(fd: int, content: object) -> None:
    raise OSError(28, "No space left on device")


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    facts, runner = built(model)
    assert runner.packed is not None
    cache = cache_of(tmp_path, model)
    (tmp_path / "cache").mkdir()
    partial = cache._path.with_suffix(".partial")
    with partial.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        cache.keep(facts, runner.packed)
        assert cache.find() is None
    cache.keep(facts, runner.packed)
    assert read(cache) is not None


@pytest.mark.parametrize("removed", [False, True])
def test_who_looks_for_what_was_left_behind_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """Another rank looks at a file that has been made, and that its writer has not locked yet."""
    model = model_of(tmp_path / "model")
    facts, runner = built(model)
    assert runner.packed is not None
    cache, lock, looked = cache_of(tmp_path, model), fcntl.flock, list[Path]()
    with contextlib.ExitStack() as looking:

        def after_another(fd: int, how: int) -> None:
            [partial] = (tmp_path / "cache").glob("*.partial")
            if not looked:
                looked.append(partial)
                if removed:
                    packed.discard_unwritten(partial)
                else:
                    lock(looking.enter_context(partial.open("wb")), how)
            lock(fd, how)

        monkeypatch.setattr(weight_cache.fcntl, "flock", after_another)
        monkeypatch.setattr(weight_cache.time, "sleep", lambda pause: looking.close())
        cache.keep(facts, runner.packed)
    assert read(cache) is not None


WATCHED = (
    "transformers",
    "accelerate",
    "gguf",
    "huggingface_hub",
    "sympy",
    "triton",
    "torch._dynamo",
    "torch.distributed.tensor",
    "uvicorn",
    "rich",
    "pygments",
)


@pytest.mark.slow
def test_a_native_rank_imports_no_modelling_code() -> None:
    """What a start from the cache imports: each of these would add a tenth of a second or more."""
    code = (
        "import sys; from services.executor.supervisor.ranks.fork_server import prepare; prepare(); import torch; "
        f"print([name for name in {WATCHED} if name in sys.modules] + dir(torch._meta_registrations)[8:])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_the_code_that_decides_what_is_packed_is_part_of_the_name() -> None:
    here = Path(weight_cache.__file__).parents[1]
    names = {path.relative_to(here).as_posix() for path in weight_cache.sources()}
    deciding = {"cpu/packed_model.py", "model/lowering.py", "model/loading/loader.py"}
    assert names >= deciding | {"model/parallel/splitting.py", "core/sharding.py"}
