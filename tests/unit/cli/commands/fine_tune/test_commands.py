"""`ryzanstein fine-tune` against a gateway that answers as it is told."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from services.cli import gateway_client
from services.cli.commands.fine_tune import command, export
from services.cli.commands.fine_tune.client import FineTuningClient
from services.cli.commands.fine_tune.command import JobUnfinished, fine_tune_app
from services.cli.gateway_client import RequestRefused
from shared.errors import ConfigurationError, Unavailable, UnknownModel
from tests.unit.cli.commands.fine_tune.fake_gateway import (
    FakeGateway,
    fake_gateway,
    fields_of,
    job,
    message,
    page,
    step,
    stream,
)

JOBS = "/v1/fine_tuning/jobs"
ONE, EVENTS = f"GET {JOBS}/ftjob-1", f"GET {JOBS}/ftjob-1/events"


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    monkeypatch.setattr(gateway_client, "PAUSE", 0.01)
    monkeypatch.setattr(command, "LOOK_EVERY", 0.01)
    monkeypatch.setenv("COLUMNS", "200")
    with fake_gateway() as fake:
        fake.answer("POST /v1/files", (200, {"id": "file-1"}), (200, {"id": "file-2"}))
        fake.answer(f"POST {JOBS}", (200, job("validating_files")))
        yield fake


def run(gateway: FakeGateway, *words: str) -> str:
    result = CliRunner().invoke(fine_tune_app, [*words, "--url", gateway.url])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def examples(directory: Path, name: str = "examples.jsonl") -> str:
    (directory / name).write_text('{"messages": []}\n')
    return str(directory / name)


def test_a_job_is_created_with_what_was_given_alone(gateway: FakeGateway, tmp_path: Path) -> None:
    assert run(gateway, "create", examples(tmp_path), "--model", "base") == "ftjob-1\n"
    (_, form), (_, body) = gateway.asked
    assert fields_of(form) == {"purpose": "fine-tune", "file": '{"messages": []}\n'}
    auto = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    assert body == {
        "model": "base",
        "training_file": "file-1",
        "method": {"type": "supervised", "supervised": {"hyperparameters": auto}},
    }


def test_all_settings_reach_the_gateway(gateway: FakeGateway, tmp_path: Path) -> None:
    options = (
        "--method dpo --suffix mine --seed 3 --metadata a=b --epochs 2 --batch-size 4 --learning-rate-multiplier 0.5 "
        "--beta 0.2 --rank 8 --alpha 4 --dropout 0.1 --target q_proj --target v_proj --schedule linear "
        "--warmup-ratio 0.1 --optimizer adamw_8bit --max-tokens 512 --truncate --replicas 2"
    )
    files = ["file-9", "--validation", examples(tmp_path)]
    shown = run(gateway, "create", *files, "--model", "base", *options.split(), "--json")
    assert json.loads(shown)["id"] == "ftjob-1"
    assert gateway.asked[-1][1] == {
        "model": "base",
        "training_file": "file-9",
        "validation_file": "file-1",
        "method": {
            "type": "dpo",
            "dpo": {"hyperparameters": {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.5, "beta": 0.2}},
        },
        "suffix": "mine",
        "seed": 3,
        "metadata": {"a": "b"},
        "lora": {"rank": 8, "alpha": 4.0, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
        "schedule": "linear",
        "warmup_ratio": 0.1,
        "optimizer": "adamw_8bit",
        "max_tokens": 512,
        "truncate": True,
        "replicas": 2,
    }


def test_what_is_wrong_is_one_sentence(gateway: FakeGateway, tmp_path: Path) -> None:
    file = examples(tmp_path)
    for words, told in (
        ([str(tmp_path / "none")], r"neither a file here nor the id of an uploaded one"),
        ([str(tmp_path)], r"cannot be read: Is a directory"),
        ([file, "--epochs", "some"], r"--epochs takes a whole number or auto, not 'some'"),
        ([file, "--learning-rate-multiplier", "x"], r"takes a number or auto"),
        ([file, "--beta", "0.1"], r"--beta belongs to --method dpo"),
        ([file, "--metadata", "x"], r"KEY=VALUE"),
        (['{"messages": []}' * 100], r"neither a file here"),
        (["~nobody-of-this-name/file"], r"neither a file here"),
        ([file, "--learning-rate-multiplier", "nan"], r"--learning-rate-multiplier takes a finite number"),
        ([file, "--alpha", "inf"], r"--alpha takes a finite number, not inf"),
        ([file, "--follow", "--json"], r"give one"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            run(gateway, "create", *words, "--model", "base")
    refusal = {"error": {"message": "The model 'none' does not exist."}}
    gateway.answer(f"POST {JOBS}", (404, refusal))
    with pytest.raises(RequestRefused, match="The model 'none' does not exist"):
        run(gateway, "create", file, "--model", "none")
    gateway.answer(f"GET {JOBS}", (500, b"broken"))
    with pytest.raises(RequestRefused, match="answered with status 500"):
        run(gateway, "list")
    with pytest.raises(ConfigurationError, match="not the address of a gateway"):
        CliRunner().invoke(fine_tune_app, ["list", "--url", "http://127.0.0.1:x"], catch_exceptions=False)


def test_a_followed_job_outlives_its_gateways(gateway: FakeGateway, tmp_path: Path) -> None:
    """Each event is told once, whatever ends in the middle."""
    done = job("succeeded", fine_tuned_model="ft:base::mine:1", progress={"step": 4, "steps": 4})
    running = job("running", progress={"step": 2, "steps": 4}, estimated_finish=1_700_000_900)
    resumed = []

    def rest(query: dict[str, str]) -> tuple[int, Any]:
        resumed.append(query["after_event"])
        gateway.answer(ONE, (0, b""), (503, {}), (200, done))
        return 200, stream(step(3, 0.9), step(4, 0.5), message(500, "The job has succeeded"))

    gateway.answer(f"POST {JOBS}", (200, job(waiting_for="All hosts are busy.")))
    gateway.answer(ONE, (200, running))
    begun = stream(message(1, "Created fine-tuning job: ftjob-1"), step(2, 1.5))
    refusal = b'data: {"error": {"message": "The gateway is draining."}}\n\n'
    gateway.answer(EVENTS, (0, begun), (0, b""), (200, refusal), (503, {}), rest)
    told = run(gateway, "create", examples(tmp_path), "--model", "base", "--follow").splitlines()
    assert resumed == [str(1_700_000_102)]
    assert [line for line in told if "loss=" not in line] == [
        "ftjob-1",
        "All hosts are busy.",
        "Created fine-tuning job: ftjob-1",
        "The job has succeeded",
        "ft:base::mine:1 is served: ask for it by this name.",
    ]
    assert told[-2] == "Step 4/4: training loss=0.50"


def test_events_are_read_page_by_page(gateway: FakeGateway) -> None:
    events = [message(number, f"event {number}") for number in range(250, 0, -1)]

    def some(query: dict[str, str]) -> tuple[int, Any]:
        names = [one["id"] for one in events]
        first = names.index(query["after"]) + 1 if "after" in query else 0
        return page(*events[first : first + 100], has_more=first + 100 < len(events))

    gateway.answer(EVENTS, some)
    lines = run(gateway, "events", "ftjob-1", "--limit", "1000").splitlines()
    assert [line.split()[-1] for line in lines[1:]] == [str(number) for number in range(1, 251)]
    newest = json.loads(run(gateway, "events", "ftjob-1", "--limit", "150", "--json"))
    assert [one["message"] for one in newest[:: len(newest) - 1]] == ["event 101", "event 250"]
    gateway.answer(EVENTS, page())
    assert len(run(gateway, "events", "ftjob-1").splitlines()) == 1


def test_a_job_that_made_no_model_is_no_success(gateway: FakeGateway) -> None:
    broken = job("failed", error={"code": "x", "message": "Loss is NaN.", "param": None})
    gateway.answer(EVENTS, (200, stream(message(1, "Created"))))
    gateway.answer(ONE, (200, broken))
    with pytest.raises(JobUnfinished, match=r"The job ftjob-1 is failed: Loss is NaN\."):
        run(gateway, "follow", "ftjob-1")
    gateway.answer(ONE, (200, job("running")), (200, job("cancelled")))
    with pytest.raises(JobUnfinished, match=r"The job ftjob-1 is cancelled\.$"):
        run(gateway, "follow", "ftjob-1")


def test_what_the_gateway_says_against_following_is_told(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.answer(ONE, (200, job("running")))
    gateway.answer(EVENTS, (429, {"error": {"message": "You follow 32 jobs at this gateway."}}))
    with pytest.raises(RequestRefused, match="You follow 32 jobs"):
        run(gateway, "follow", "ftjob-1")
    monkeypatch.setattr(gateway_client, "PATIENCE", 0.05)
    gateway.answer(EVENTS, (0, b""))
    with pytest.raises(Unavailable, match="did not answer"):
        run(gateway, "follow", "ftjob-1")


async def test_who_stops_following_is_told_that_the_job_goes_on(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = asyncio.Event()

    class Jobs:
        async def follow(self, name: str) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield

        async def get(self, name: str) -> Any:
            asked.set()
            return job("running")

    following = asyncio.create_task(command._followed(cast(FineTuningClient, Jobs()), job("running")))
    await asked.wait()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert "`ryzanstein fine-tune follow ftjob-1` follows it again" in capsys.readouterr().out


def test_jobs_are_shown(gateway: FakeGateway) -> None:
    made = job("succeeded", id="ftjob-2", fine_tuned_model="ft:base::a:2", progress={"step": 4, "steps": 4})
    gateway.answer(f"GET {JOBS}", page(made, job()))
    _, first, second = (re.split(r" {2,}", line) for line in run(gateway, "list").splitlines())
    assert first[1:] == ["succeeded", "4/4", "base", "ftjob-2", "ft:base::a:2"]
    assert second[1:5] == ["queued", "-", "base", "ftjob-1"]
    assert [one["id"] for one in json.loads(run(gateway, "list", "--json"))] == ["ftjob-2", "ftjob-1"]

    failed = job(
        "failed",
        error={"code": "invalid", "message": "line 3: no messages.", "param": "training_file"},
        progress={"step": 1, "steps": 4, "host": "e-2", "executors_lost": 1, "resumed_from_step": 0},
        trained_tokens=1234,
        finished_at=1_700_000_100,
        waiting_for="",
    )
    gateway.answer(ONE, (200, failed))
    shown = run(gateway, "status", "ftjob-1")
    for words in (
        r"status +failed",
        r"error +line 3: no messages\. \(training_file\)",
        r"steps +1 of 4",
        r"executor +e-2 \(1 lost, resumed at step 0\)",
        r"tokens +1,234",
        r"settings +n_epochs 2, batch_size auto, rank 16",
        r"finished +2023-11-1",
    ):
        assert re.search(words, shown), (words, shown)
    assert json.loads(run(gateway, "status", "ftjob-1", "--json")) == failed


@pytest.mark.parametrize("action", ["cancel", "pause", "resume"])
def test_jobs_are_acted_on(gateway: FakeGateway, action: str) -> None:
    path = f"POST {JOBS}/ftjob-1/{action}"
    gateway.answer(path, (200, job("paused")))
    assert re.search(r"status +paused", run(gateway, action, "ftjob-1"))
    assert json.loads(run(gateway, action, "ftjob-1", "--json"))["status"] == "paused"
    gateway.answer(path, (409, {"error": {"message": f"Cannot {action} it: it is over."}}))
    with pytest.raises(RequestRefused, match=f"Cannot {action} it"):
        run(gateway, action, "ftjob-1")


def checkpoint(at: int, name: str = "ft:base::a:1", **metrics: float) -> dict[str, Any]:
    return {
        "id": f"ftckpt-{at}",
        "step_number": at,
        "created_at": 1_700_000_000,
        "fine_tuned_model_checkpoint": f"{name}:ckpt-step-{at}",
        "fine_tuning_job_id": "ftjob-1",
        "metrics": {"step": at, **metrics},
    }


def test_checkpoints_are_shown_in_their_order(gateway: FakeGateway) -> None:
    path = f"GET {JOBS}/ftjob-1/checkpoints"
    gateway.answer(path, page(checkpoint(4, train_loss=0.5, valid_loss=0.75), checkpoint(2, train_loss=1.5)))
    _, first, second = (line.split() for line in run(gateway, "checkpoints", "ftjob-1").splitlines())
    assert (first[:3], first[-1]) == (["2", "1.5", "-"], "ft:base::a:1:ckpt-step-2")
    assert second[:3] == ["4", "0.5", "0.75"]
    assert len(json.loads(run(gateway, "checkpoints", "ftjob-1", "--json"))) == 2
    gateway.answer(path, page())
    assert "ftjob-1 has no checkpoint yet" in run(gateway, "checkpoints", "ftjob-1")


def test_an_adapter_is_exported_by_job_or_model(gateway: FakeGateway, tmp_path: Path) -> None:
    """Whichever names it: a job, its model, a checkpoint of either, also of a job that made no model."""
    files: list[str] = []

    def adapter(query: dict[str, str]) -> tuple[int, Any]:
        files.append(query.get("checkpoint", ""))
        return 200, b"data"

    made = job("succeeded", fine_tuned_model="ft:base::a:1")
    broken = job("failed", id="ftjob-2")
    gateway.answer(ONE, (200, made))
    gateway.answer(f"GET {JOBS}", page(made, broken))
    gateway.answer(f"GET {JOBS}/ftjob-2/checkpoints", page(checkpoint(6, "ft:base::b:2")))
    for name in ("ftjob-1", "ftjob-2"):
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            gateway.answer(f"GET {JOBS}/{name}/adapter/{file}", adapter)
    for number, (words, steps) in enumerate(
        (
            (["ftjob-1"], ""),
            (["ft:base::a:1"], ""),
            (["ft:base::a:1:ckpt-step-2"], "2"),
            (["ftjob-1", "--checkpoint", "4"], "4"),
            (["ft:base::b:2:ckpt-step-6"], "6"),
        )
    ):
        files.clear()
        output = tmp_path / "some" / str(number)
        assert "is ready" in run(gateway, "export", *words, "--output", str(output))
        assert files == [steps, steps]
        assert sorted(path.name for path in output.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not list((tmp_path / "some").glob(".*")), "nothing is left beside them"
    with pytest.raises(UnknownModel, match="None of your jobs produced the model 'ft:base::c:3'"):
        run(gateway, "export", "ft:base::c:3", "--output", str(tmp_path / "out"))


def test_what_cannot_be_exported_is_told_before_anything_is_fetched(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RYZANSTEIN_MODEL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigurationError, match="exists already"):
        run(gateway, "export", "ftjob-1", "--output", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"does not end in \.gguf"):
        run(gateway, "export", "ftjob-1", "--output", str(tmp_path / "out"), "--format", "gguf")
    output = str(tmp_path / "out")
    with pytest.raises(ConfigurationError, match=r"The base 'none' is not in .* cache"):
        run(gateway, "export", "ftjob-1", "--output", output, "--format", "safetensors", "--base", "none")
    examples(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot be written: "):
        run(gateway, "export", "ftjob-1", "--output", str(tmp_path / "examples.jsonl" / "out"))
    assert gateway.asked == []


def test_a_merged_model_is_exported(gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `models convert`, from the base in the cache, found by the name that it is served under."""
    monkeypatch.setenv("RYZANSTEIN_MODEL_CACHE", str(tmp_path / "cache"))
    base, adapters = tmp_path / "cache" / "base", []
    gateway.answer(ONE, (200, job("succeeded", fine_tuned_model="ft:base::a:1")))
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        gateway.answer(f"GET {JOBS}/ftjob-1/adapter/{file}", (200, file.encode()))
    output = ["--output", str(tmp_path / "out.gguf"), "--format", "gguf"]
    with pytest.raises(ConfigurationError, match="fetch it with `ryzanstein models pull base`"):
        run(gateway, "export", "ftjob-1", *output)
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    commands = []

    def converted(command: list[str], report: object) -> dict[str, Any]:
        commands.append(command)
        adapters.append(command[command.index("--adapter") + 1])
        assert (Path(adapters[-1]) / "adapter_config.json").read_text() == "adapter_config.json"
        return {"bytes": 1_000_000, "dtype": "bf16", "codes": "Q4_0"}

    monkeypatch.setattr(export, "convert_model", converted)
    shown = run(gateway, "export", "ftjob-1", *output)
    assert "out.gguf is ready, 1 MB, weights of bf16" in shown
    assert "The base is kept as Q4_0" in shown
    run(gateway, "export", "ftjob-1", *output, "--dtype", "q8_0")
    expected = ["convert", str(base), output[1], "--to", "gguf", "--adapter"]
    assert [command[:6] for command in commands] == [expected, expected]
    assert commands[1][-2:] == ["--dtype", "q8_0"]
    assert not any(Path(one).exists() for one in adapters)
