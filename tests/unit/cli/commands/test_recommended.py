"""`ryzanstein models recommend`: what fits a machine, and the line of `up`."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from services.cli import recommended_models
from services.cli.commands.models import recommend
from services.cli.groups import GROUPS, command_line
from services.cli.recommended_models import MODELS, USES, better_model, better_than, fitting
from shared.errors import ConfigurationError
from shared.model_store.catalog import BUILT_IN, DEFAULT_MODEL
from shared.model_store.settings import Store
from shared.models import hub_name

GB = 1_000_000_000


def test_the_table_is_in_order_and_can_be_pulled() -> None:
    for use in USES:
        sizes = [(model.bytes // 10_000_000) for model in MODELS if model.use == use]
        assert len(sizes) > 2
    for model in MODELS:
        repository, _ = hub_name(model.name)
        assert model.name in BUILT_IN or repository.count("/") == 1
        assert model.read_per_token <= model.bytes
        assert model.licence
        assert model.about


def test_what_fits_and_how_fast_it_is() -> None:
    found = fitting(MODELS, 5 * GB, 20e9)
    assert found
    assert all(one.memory <= 5 * GB for one in found)
    speeds = {one.model.name: one.tokens_per_second for one in found}
    assert speeds["Qwen/Qwen3-4B-GGUF:Q4_K_M"] == 5.6
    assert speeds["Qwen/Qwen3-Embedding-0.6B"] == 0
    assert fitting(MODELS, GB, 20e9) == []
    mixture = [one for one in fitting(MODELS, 100 * GB, 20e9) if one.model.active]
    assert all(one.tokens_per_second == 7.0 for one in mixture)


@pytest.mark.parametrize(
    ("memory", "name"),
    [(64 * GB, "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M"), (8 * GB, "Qwen/Qwen3-4B-GGUF:Q4_K_M"), (1 * GB, None)],
)
def test_a_better_one_is_large_and_not_slow(memory: int, name: str | None) -> None:
    found = better_than(DEFAULT_MODEL, memory)
    assert (found.name if found else None) == name


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommend, "read_rate", lambda threads: 20e9)
    monkeypatch.setattr(recommend, "memory_left", lambda: 4 * GB)
    app = command_line([group for group in GROUPS if "models" in group.commands])
    shown = CliRunner().invoke(app, ["models", "recommend", "--for", "code"]).output
    assert "Qwen2.5-Coder-1.5B" in shown
    assert "3 more need more memory than this machine has." in shown
    assert "To serve one: ryzanstein up --model Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M" in shown
    monkeypatch.setattr(recommend, "read_rate", lambda threads: 1e9)
    shown = CliRunner().invoke(app, ["models", "recommend"]).output
    assert "To serve one: ryzanstein up --model SmolLM2-135M-Instruct" in shown, "a slow machine chats all the same"
    assert "640 MB" in shown
    monkeypatch.setattr(recommend, "read_rate", lambda threads: 20e9)
    told = json.loads(CliRunner().invoke(app, ["models", "recommend", "--json"]).output)
    assert (told["memory"], told["bandwidth"]) == (4 * GB, 20e9)
    assert {one["model"]["use"] for one in told["models"]} == set(USES)
    refused = CliRunner().invoke(app, ["models", "recommend", "--for", "vision"])
    assert isinstance(refused.exception, ConfigurationError)


@pytest.mark.parametrize("answer", ["yes", "no", "offline"])
async def test_the_line_of_up_where_the_hub_answers(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def head(self: httpx.AsyncClient, url: str, **options: Any) -> httpx.Response:
        asked.append(url)
        if answer == "no":
            raise httpx.ConnectTimeout("nobody")
        return httpx.Response(200)

    monkeypatch.setattr(httpx.AsyncClient, "head", head)
    monkeypatch.setattr(recommended_models, "memory_left", lambda: 8 * GB)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if answer == "offline" else "")
    line = await better_model(DEFAULT_MODEL, Store(tmp_path, endpoint="http://mirror"))
    assert asked == ([] if answer == "offline" else ["http://mirror"])
    assert line == (
        "A better model fits this machine (2,500 MB): ryzanstein up --model Qwen/Qwen3-4B-GGUF:Q4_K_M"
        if answer == "yes"
        else ""
    )
