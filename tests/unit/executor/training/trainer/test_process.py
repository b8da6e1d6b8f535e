"""The trainer as a process, over a small transformer: whatever kills it, the adapter is that of an undisturbed run."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from services.executor.collectives.shared_memory import can_share_memory
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.trainer_pipe import (
    EXAMPLES,
    PAUSE,
    STATE,
    SUSPENDED,
    AdapterWritten,
    Finished,
    Loaded,
    Paused,
    StateWritten,
    Stepped,
    TrainerEvent,
    TrainerFailed,
    TrainerPipe,
    TrainerSpec,
)
from services.executor.model.adapters.files import inspect_adapter
from services.executor.model.loading.loader import load_config
from services.executor.supervisor.ranks.rank_process import environment
from services.executor.training.ranks import join_ranks
from services.executor.training.trainer.process import run
from shared.errors import RingLost
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.training.trainer.jobs import examples_of, job_of, make_spec, random_texts

_events = msgspec.json.Decoder(TrainerEvent)
VOCABULARY = 131


# A trainer that gives way to nobody, nor do the ranks that it starts: beside other tests it would hardly be
# scheduled.
AT_ONCE = (
    "import os, sys; from services.executor.training import __main__ as trainer; trainer.give_way = lambda: None; "
    "from services.executor.training import ranks; ranks.COMMAND = [*sys.orig_argv[:3], 'rank']; "
    "os._exit(trainer.main(int(sys.argv[-1])))"
)


def _command_line(pid: str) -> bytes:
    """Empty: it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class Process:
    """A trainer, as an executor starts it."""

    def __init__(self, spec: TrainerSpec) -> None:
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", AT_ONCE, str(write)],
            stdin=subprocess.PIPE,
            pass_fds=(write,),
            process_group=0,
            env=environment(spec.threads, ExecutorSettings.model_validate(spec.settings)),
        )
        os.close(write)
        self._events = os.fdopen(read, "rb")
        self.told: list[Any] = []
        self.write(msgspec.json.encode(spec) + b"\n")

    def write(self, line: bytes) -> None:
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def events(self) -> Iterator[Any]:
        """What it tells, until it ends."""
        for line in self._events:
            self.told.append(_events.decode(line))
            yield self.told[-1]

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes."""
        os.killpg(self._process.pid, number)

    def other_ranks(self) -> list[int]:
        """Their process ids. What libraries start while they are imported are children too."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if b"\0rank\0" in _command_line(child)]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]

    def end(self, *, kill: bool = False) -> int:
        assert self._process.stdin is not None
        if kill:
            self._process.kill()
        self.told += [_events.decode(line) for line in self._events]
        code = self._process.wait()
        self._process.stdin.close()
        self._events.close()
        return code


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model", "llama")


def spec_of(directory: Path, model: Path, **changes: Any) -> TrainerSpec:
    job = job_of(changes.pop("method", "supervised"), **{"dropout": 0.1, **changes.pop("hyperparameters", {})})
    training = examples_of(random_texts(12, vocabulary=VOCABULARY))
    validation = examples_of(random_texts(4, seed=1, vocabulary=VOCABULARY))
    settings = {"model": str(model), "device": "cpu", "model_cache": str(model.parent / "cache")}
    settings |= {"tp": changes.pop("tp", 1)}
    return make_spec(
        directory, job, training, validation, str(model), **{"settings": settings, "threads": 2, **changes}
    )


def run_here(spec: TrainerSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Any]]:
    """The same in this process, which has imported everything already: (exit code, what it tells)."""
    monkeypatch.setattr(TrainerPipe, "listen", lambda pipe: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    commands = io.BytesIO(msgspec.json.encode(spec) + b"\n")
    with tempfile.TemporaryFile() as events:
        try:
            code = run(commands, events.fileno())
        finally:
            torch.use_deterministic_algorithms(False)
        events.seek(0)
        return code, [_events.decode(line) for line in events]


def trained(spec: TrainerSpec) -> Process:
    """A run that nothing disturbs."""
    process = Process(spec)
    for _ in process.events():
        pass
    assert process.end() == 0, process.told
    return process


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_killed_time_and_again_it_makes_the_same_adapter(tmp_path: Path, model: Path) -> None:
    whole = trained(spec_of(tmp_path / "whole", model, method="dpo"))
    (result,) = [event for event in whole.of(AdapterWritten) if event.is_result]
    directory = tmp_path / "killed"
    spec = spec_of(directory, model, method="dpo")
    told: list[Any] = []
    # So many events after which it dies: before, in or after the writing of a state.
    for kills in (3, 1, None):
        process = Process(spec)
        for event in process.events():
            if isinstance(event, StateWritten):
                shutil.copyfile(directory / event.file, directory / STATE)
            if kills is not None and len(process.told) > kills and not isinstance(event, Loaded):
                break
        code = process.end(kill=kills is not None)
        assert code == (0 if kills is None else -9)
        told += process.told
    assert any(isinstance(event, Loaded) and event.step > 0 for event in told)
    (again,) = [event for event in process.told if isinstance(event, AdapterWritten) and event.is_result]
    assert again.digest == result.digest
    assert {event.digest for event in whole.of(AdapterWritten)} == {
        event.digest for event in told if isinstance(event, AdapterWritten)
    }
    tables = [(where / "steps.csv").read_bytes() for where in (tmp_path / "whole", directory)]
    assert tables[0] == tables[1]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(not can_share_memory(), reason="there are no collectives in shared memory here")
def test_ranks_make_what_one_process_makes(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended again and again, and where one of them dies: the same bits as without that."""
    whole = trained(spec_of(tmp_path / "2", model, tp=2))
    _, told = run_here(spec_of(tmp_path / "1", model), monkeypatch)
    alone = [event for event in told if isinstance(event, Stepped)]
    for one, two in zip(alone, whole.of(Stepped), strict=True):
        for name in ("train_loss", "grad_norm", "valid_loss"):
            first, second = (getattr(told.metrics, name) for told in (one, two))
            assert second == (first and pytest.approx(first, rel=1e-5)), name
    (result,) = [event for event in whole.of(AdapterWritten) if event.is_result]
    directory = tmp_path / "disturbed"
    for dies in (True, False):
        process = Process(spec_of(directory, model, tp=2))
        others: list[int] = []
        for event in process.events():
            if isinstance(event, Loaded):
                others = process.other_ranks()
            if isinstance(event, StateWritten):
                shutil.copyfile(directory / event.file, directory / STATE)
                process.signal(signal.SIGSTOP)  # wherever they are, one in a sum and one on its way there
                process.signal(signal.SIGCONT)
                if dies and others:
                    os.kill(others.pop(), signal.SIGKILL)
        process.end()
        last = process.told[-1]
        # It may be done before it is disturbed, where this test waits for a core.
        assert isinstance(last, Finished) or (dies and last.code == RingLost.code)
    (again,) = [event for event in process.of(AdapterWritten) if event.is_result]
    assert again.digest == result.digest


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not can_share_memory(), reason="there are no collectives in shared memory here")
def test_a_rank_that_dies_ends_the_training(tmp_path: Path, model: Path) -> None:
    """Before they have met, too."""
    process = Process(spec_of(tmp_path / "job", model, tp=2))
    while not (others := process.other_ranks()):
        time.sleep(0.01)
    os.kill(*others, signal.SIGKILL)
    assert process.end() == 1
    (failed,) = process.told
    assert isinstance(failed, TrainerFailed)
    assert (failed.code, failed.step) == (RingLost.code, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not can_share_memory(), reason="there are no collectives in shared memory here")
def test_a_rank_that_fails_says_why_itself(tmp_path: Path, model: Path) -> None:
    """First of all: what its end has come to is told afterwards."""
    spec = spec_of(tmp_path, model, tp=2)
    (tmp_path / EXAMPLES).write_bytes(b"")
    process = Process(spec)
    assert process.end() == 1
    assert (process.told[0].code, process.told[0].step) == ("internal_error", 0)
    assert "DecodeError" in process.told[0].message


@pytest.mark.parametrize(
    ("tp", "device", "changes", "why"),
    [
        (16, "cpu", {}, "9 attention heads and cannot be split over 16 ranks"),
        (2, "cuda", {}, "one GPU"),
        (2, "cpu", {"replicas": 2}, "each replica"),
        (1, "cpu", {}, ""),
    ],
)
def test_one_process_trains_where_several_cannot(
    tmp_path: Path, model: Path, tp: int, device: str, changes: dict[str, Any], why: str
) -> None:
    spec = spec_of(tmp_path, model, tp=tp, hyperparameters=changes)
    with capture_logs() as logged:
        ranks = join_ranks(spec, ExecutorSettings.model_validate(spec.settings), torch.device(device), -1)
    assert ranks.world_size == 1
    assert [why in entry["reason"] for entry in logged] == [True] * (tp > 1)


def test_peft_loads_what_it_makes(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the digest is that of an adapter that is loaded by hand."""
    code, told = run_here(spec_of(tmp_path, model, hyperparameters={"alpha": 12.0}), monkeypatch)
    (result,) = [event for event in told if isinstance(event, AdapterWritten) and event.is_result]
    assert (code, told[0]) == (0, Loaded(0, 6))
    directory = tmp_path / result.directory
    found = inspect_adapter(directory, load_config(model))
    assert (found.digest, found.rank, found.bytes) == (result.digest, result.rank, result.bytes)
    base = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    tokens = torch.tensor([random_texts(1, vocabulary=VOCABULARY)[0]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what peft calls is deprecated in transformers
        before = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, str(directory))
        after = adapted(tokens).logits
    assert (before - after).abs().max() > 1e-3
    config = adapted.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 12.0, 0.1)
    trained_linears = {name for name, _ in adapted.named_modules() if name.endswith("lora_A.default")}
    assert len(trained_linears) == found.modules


GIVE_WAY = """
import json, os, pathlib, threading
from services.executor.training.__main__ import give_way
give_way()
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(json.dumps([found[0], os.environ["OMP_DYNAMIC"], pathlib.Path("/proc/self/oom_score_adj").read_text().strip()]))
"""


@pytest.mark.slow
def test_it_gives_way_to_all_others() -> None:
    """Its threads too, which inherit it. Without its imports, which take long for one that gives way."""
    told = subprocess.run([sys.executable, "-c", GIVE_WAY], check=True, capture_output=True).stdout
    assert msgspec.json.decode(told) == [os.SCHED_IDLE, "FALSE", "900"]


@pytest.mark.parametrize("ends", ["commands", "events"])
def test_it_ends_with_its_supervisor(ends: str) -> None:
    listening = (
        "import sys, threading, time; from services.executor.ipc.trainer_pipe import Paused, TrainerPipe; "
        "pipe = TrainerPipe(sys.stdin.buffer, int(sys.argv[1])); pipe.listen(); pipe.send(Paused(1)); "
        "pipe.pause.wait(); pipe.send(Paused(int(time.monotonic() - pipe.clock()))); threading.Event().wait()"
    )
    read, write = os.pipe()
    command = [sys.executable, "-c", listening, str(write)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(write,))
    os.close(write)
    assert process.stdin is not None
    assert _events.decode(os.read(read, 100)) == Paused(1)
    if ends == "events":
        os.close(read)
    process.stdin.write(SUSPENDED + b" 3.5\n" + PAUSE)
    process.stdin.flush()
    if ends == "commands":
        assert _events.decode(os.read(read, 100)) == Paused(3), "its clock stood while it was suspended"
        os.close(read)
        process.stdin.close()
    assert process.wait() == 1
    process.stdin.close()


@pytest.mark.nightly
def test_a_pause_before_it_is_loaded_is_its_first_step(tmp_path: Path, model: Path) -> None:
    process = Process(spec_of(tmp_path / "job", model))
    process.write(PAUSE)
    assert process.end() == 0
    assert process.told == [Loaded(0, 6), Paused(0)]


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        ({"optimizer": "adamw_8bit"}, "configuration_error", "needs a CUDA GPU"),
        ({"targets": ["nothing"]}, "invalid_request", "nothing"),
    ],
)
def test_what_cannot_be_trained_is_told_in_one_sentence(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], code: str, told: str
) -> None:
    ended, (failed,) = run_here(spec_of(tmp_path, model, hyperparameters=changes), monkeypatch)
    assert ended == 1
    assert isinstance(failed, TrainerFailed)
    assert (failed.code, failed.step) == (code, 0)
    assert told in failed.message


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "has run out of memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "CUDA error"),
        (ValueError("odd"), "The trainer of the job ftjob-test failed: ValueError: odd"),
    ],
)
def test_whatever_fails_is_told(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def failing(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(run, "__defaults__", (failing,))
    ended, (failed,) = run_here(spec_of(tmp_path, model), monkeypatch)
    assert ended == 1
    assert told in failed.message
