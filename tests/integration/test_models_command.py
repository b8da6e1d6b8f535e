"""`ryzanstein models` against a running cluster: a real NATS, and a host that does as the registry says."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.cli.cluster_models import ModelsSnapshot
from services.cli.commands.models.local import models_app
from shared.config import CommonSettings
from shared.errors import ConfigurationError, DeadlineExceeded, ModelDoesNotFit, ModelLoadError, UnknownModel
from shared.messages import GroupLoad, GroupRecord
from shared.messages.registry import (
    AdapterRecord,
    HostBeat,
    HostCommand,
    HostModel,
    HostRecord,
    HostReply,
    ModelPlacement,
    ModelSettings,
    ModelSpec,
    PullModel,
    RemoveModel,
    WantedAdapter,
)
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.commands import Command

HOST = "host-0"


class Cluster:
    """One host and whoever tells it what to do: models are loaded and unloaded as the registry has it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.registry = Bucket(bus, subjects.REGISTRY_BUCKET, ModelSpec)
        self.groups = Bucket(bus, subjects.GROUPS_BUCKET, GroupRecord)
        self.hosts = Bucket(bus, subjects.HOSTS_BUCKET, HostRecord)
        self.placements = Bucket(bus, subjects.PLACEMENTS_BUCKET, ModelPlacement)
        self.told: list[HostCommand] = []
        self.said: dict[str, HostModel] = {}
        self.fails: set[str] = set()
        self.too_large: set[str] = set()
        self.busy: set[str] = set()
        self.refuses = ""

    async def run(self) -> None:
        async for update in self.registry.watch():
            if update is not None:
                await self._obey(*update)

    async def start(self) -> None:
        for bucket in (self.registry, self.groups, self.hosts, self.placements):
            await bucket.ensure()  # type: ignore[attr-defined]
        await self._bus.subscribe(subjects.host_control(HOST), HostCommand, self._answer)
        await self.write_host()

    async def write_host(self) -> None:
        beat = HostBeat(1 << 40, models=list(self.said.values()), takes_models=True)
        await self.hosts.put(HOST, HostRecord(HOST, beat, "ready"))

    async def _obey(self, model: str, spec: ModelSpec | None) -> None:
        if spec is None or spec.action == "unload":
            await self.group(model, "draining" if model in self.busy else "gone")
        elif model in self.fails:
            self.said[model] = HostModel(model, "failed", error="It is no model.", failed_at=time.time())
            await self.write_host()
        elif model in self.too_large:
            reason = "It needs 9 GB, and 1 GB is free; pinned is pinned."
            await self.placements.put(model, ModelPlacement(model, code="model_does_not_fit", reason=reason))
        elif spec.least or spec.action == "load":
            self.said[model] = HostModel(model, "loading", done=1, total=4)
            await self.write_host()
            await self.group(model, "ready")
            del self.said[model]
            await self.write_host()

    async def group(self, model: str, state: Any) -> None:
        name = f"{HOST}/{model}"
        load = GroupLoad(running=0, waiting=0, free_blocks=1, total_blocks=1)
        await self.groups.put(name, GroupRecord(name, model, state, 1, [], load, instance=HOST, memory=3 << 30))

    async def _answer(self, command: HostCommand) -> HostReply:
        self.told.append(command)
        if self.refuses:
            return HostReply(ok=False, code="model_load_error", error=self.refuses)
        if isinstance(command, PullModel):
            state: Any = "failed" if command.spec.name in self.fails else "stored"
            name = command.spec.name
            self.said[name] = HostModel(name, state, error="No such repository.", failed_at=time.time() + 1)
            await self.write_host()
        return HostReply(ok=True)


@pytest.fixture
async def cluster(bus: Bus) -> AsyncIterator[Cluster]:
    made = Cluster(bus)
    await made.start()
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.fixture
def command(nats_settings: CommonSettings) -> Command:
    return Command(models_app, nats_settings, ("add", "load", "unload", "remove", "apply", "pull"))


async def test_a_model_comes_is_changed_and_goes(command: Command, cluster: Cluster) -> None:
    said = await command.run("add", "chat", "--source", "org/name", "--alias", "gpt", "--setting", "tp=2")
    assert said == "chat is unloaded.\n"
    said = await command.run("add", "chat", "--source", "org/name", "--alias", "gpt", "--setting", "tp=2")
    assert said == "chat is unloaded.\n"  # as it stands: no error
    assert "chat is loaded on host-0." in await command.run("load", "gpt")
    assert (await command.run("load", "chat")).endswith("chat is loaded on host-0.\n")
    entry = await cluster.registry.get("chat")
    assert (entry.value.settings, entry.value.most) == (ModelSettings(tp=2), 1)

    changed = await command.json(
        "set", "chat", "--least", "2", "--pin", "--idle", "10m", "--setting", "tp=", "--alias", ""
    )
    assert changed["registry"] | {"created": 0, "action_at": 0} == {
        "name": "chat",
        "source": "org/name",
        "least": 2,
        "most": 2,
        "pinned": True,
        "idle": 600.0,
        "action": "load",
        "action_at": 0,
        "created": 0,
        "settings": {},
    }
    listed = await command.run("list")
    assert listed.splitlines()[0].split() == ["model", "status", "replicas", "memory", "adapters", "source"]
    row = " ".join(listed.splitlines()[1].split())
    assert row == "chat loaded, pinned 1 (of 2) 3,221 MB 0 org/name"
    shown = await command.run("show", "chat")
    assert "group host-0/chat  ready, 0 running, 0 waiting" in shown
    assert "idle          600.0" in shown

    (model,) = (await command.json("list"))["models"]
    assert (model["name"], model["status"]["state"], model["status"]["hosts"]) == ("chat", "loaded", [HOST])
    assert "keep the settings" not in await command.run("set", "chat", "--no-pin")
    told = await command.run("set", "chat", "--setting", "context_length=4096")
    assert "Its groups keep the settings that they were loaded with: `ryzanstein models unload chat`" in told
    told = await command.run("set", "chat", "--sparse-attention", "window,recent=4096")
    assert "keep the settings" not in told, "a window needs nothing that groups keep"
    assert "sparse_attention  window,recent=4096" in await command.run("show", "chat")
    assert "keep the settings" in await command.run("set", "chat", "--sparse-attention", "on")
    assert "keep the settings" in await command.run("set", "chat", "--sparse-attention", "")
    assert "sparse" not in await command.run("show", "chat")
    assert "chat is unloaded" in await command.run("unload", "chat", "--force")
    entry = await cluster.registry.get("chat")
    assert (entry.value.action, entry.value.force) == ("unload", True)
    assert await command.run("remove", "chat", "--files") == "chat: unloaded\nchat is removed with its files.\n"
    assert cluster.told == [RemoveModel(msgspec.structs.replace(entry.value))]
    assert await cluster.registry.items() == {}


async def test_what_can_be_told_from_its_name_is_added_when_it_is_loaded(
    command: Command, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "tiny").mkdir()
    loaded = await command.json("load", str(tmp_path / "tiny"), "org/name:Q4_K_M", "smollm2-135m-instruct")
    assert [model["registry"]["source"] for model in loaded] == [
        str(tmp_path / "tiny"),
        "org/name:Q4_K_M",
        "SmolLM2-135M-Instruct",
    ]
    assert [model["name"] for model in loaded] == ["tiny", "org/name:Q4_K_M", "SmolLM2-135M-Instruct"]
    assert "tiny is loaded" in await command.run("load", str(tmp_path / "tiny"))


async def test_errors_are_one_sentence(command: Command, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.model_status.JUST_ASKED", 0.5)
    monkeypatch.setattr("services.cli.cluster_models.SETTLED", 0.3)
    with pytest.raises(UnknownModel, match="there is none yet"):
        await command.run("load", "chat")
    cluster.fails, cluster.too_large = {"broken"}, {"large"}
    await command.run("add", "large", "--source", "org/large", "--no-wait")
    with pytest.raises(UnknownModel, match="'larg' in the registry; large may be meant"):
        await command.run("unload", "larg")
    with pytest.raises(ModelDoesNotFit, match="It needs 9 GB"):
        await command.run("load", "large")
    with pytest.raises(ModelLoadError, match="broken could not be loaded on host-0: It is no model"):
        await command.run("add", "broken", "--least", "1")
    with pytest.raises(ConfigurationError, match="already registered with different settings"):
        await command.run("add", "large", "--source", "elsewhere")
    with pytest.raises(ConfigurationError, match="'large' of 'other' is taken by the model large"):
        await command.run("add", "other", "--alias", "large")
    with pytest.raises(ConfigurationError, match="tp cannot be 99: it must be 1 to 64"):
        await command.run("set", "large", "--setting", "tp=99")
    with pytest.raises(ConfigurationError, match=r"`settings\.tpp`; tp may be meant"):
        await command.run("set", "large", "--setting", "tpp=1")
    with pytest.raises(ConfigurationError, match="--sparse-attention: 'much' is none of on, off, pages, window"):
        await command.run("set", "large", "--sparse-attention", "much")
    with pytest.raises(ConfigurationError, match=r"Invalid `sparse_attention\.threshold`: it is 9, below"):
        await command.run("set", "large", "--sparse-attention", "threshold=9")
    with pytest.raises(ConfigurationError, match="KEY=VALUE"):
        await command.run("set", "large", "--setting", "tp")
    with pytest.raises(ConfigurationError, match="Nothing to change"):
        await command.run("set", "large")
    with pytest.raises(ConfigurationError, match="waits until the model is unloaded"):
        await command.run("remove", "large", "--files", "--no-wait")
    await cluster.group("own", "ready")
    with pytest.raises(UnknownModel, match="own is served by an executor that was started with it"):
        await command.run("unload", "own")
    assert "an executor's own --model" in await command.run("show", "own")
    cluster.busy = {"large"}
    await cluster.group("large", "ready")
    with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s; it goes on"):
        await command.run("unload", "large", "--timeout", "0.5")


async def test_hosts_fetch_a_model(command: Command, cluster: Cluster) -> None:
    assert "org/name is ready on host-0" in await command.run("pull", "org/name")
    assert cluster.told == [PullModel(ModelSpec("org/name", "org/name"))]
    cluster.fails = {"org/none"}
    with pytest.raises(ModelLoadError, match="host-0 could not fetch org/none: No such repository"):
        await command.run("pull", "org/none")
    cluster.refuses = "The disk is full."
    with pytest.raises(ModelLoadError, match="host-0: The disk is full"):
        await command.run("pull", "org/name")
    await command.run("add", "chat", "--source", "org/name")
    with pytest.raises(ConfigurationError, match="some of its files remain on host-0: The disk is full"):
        await command.run("remove", "chat", "--files")


FILE = """\
models:
  - name: a
    source: org/a
    least: 1
  - name: b
    source: org/b
"""


async def test_a_file_leaves_what_it_does_not_declare(command: Command, cluster: Cluster, tmp_path: Path) -> None:
    """Such as sampling defaults that Ollama's API has set, but for those of an alias that is gone."""
    file = tmp_path / "models.yaml"
    file.write_text(FILE.replace("least: 1", "aliases: [x, y]"))
    await command.run("apply", "-f", str(file))
    defaults = {"a": {"top_k": 7.0}, "x": {"top_k": 8.0}, "y": {"top_k": 9.0}}
    spec = (await cluster.registry.items())["a"]
    await cluster.registry.put("a", msgspec.structs.replace(spec, defaults=defaults))
    assert await command.run("apply", "-f", str(file)) == "a: unchanged\nb: unchanged\n"
    assert (await cluster.registry.items())["a"].defaults == defaults
    file.write_text(FILE.replace("least: 1", "aliases: [x]"))
    await command.run("apply", "-f", str(file))
    assert (await cluster.registry.items())["a"].defaults == {"a": defaults["a"], "x": defaults["x"]}


async def test_a_file_is_applied_as_a_whole(command: Command, cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(FILE)
    await command.run("add", "mine", "--source", "org/mine")
    assert await command.run("apply", "-f", str(file), "--dry-run") == "a: added\nb: added\n"
    assert list(await cluster.registry.items()) == ["mine"]
    said = await command.run("apply", "-f", str(file), "--wait")
    assert said.removeprefix("a: unloaded\n") == "a: loaded\na: added\nb: added\n"  # where it looked as soon as that
    await command.run("unload", "a")
    file.write_text(FILE.replace("name: b", "name: c").replace("least: 1", "least: 2"))
    said = await command.json("apply", "-f", str(file))
    none: dict[str, list[str]] = {key: [] for key in ("added", "changed", "unchanged", "removed")}
    assert said == {
        "added": ["c"],
        "changed": ["a"],
        "unchanged": [],
        "removed": ["b"],
        "adapters": none,
        "warning": "",
    }
    specs = await cluster.registry.items()
    assert sorted(specs) == ["a", "c", "mine"]
    assert (specs["a"].action, specs["a"].most, specs["a"].origin) == ("unload", 2, "file")
    file.write_text(FILE.replace("name: a", "name: mine\n    aliases: [c]") + "    tp: 1\n")
    with pytest.raises(ConfigurationError, match=r"has 1 error; nothing was applied:\n  line 8: There is no `tp`"):
        await command.run("apply", "-f", str(file))
    file.write_text(FILE.replace("name: a", "name: d\n    aliases: [mine]"))
    with pytest.raises(ConfigurationError, match="'mine' of 'd' is taken by the model mine"):
        await command.run("apply", "-f", str(file))
    assert await cluster.registry.items() == specs
    assert await command.run("apply", "-f", "-", text="models: []") == "a: removed\nc: removed\n"
    assert await command.run("apply", "-f", "-", text="models: []") == "The file declares no models.\n"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        await command.run("apply", "-f", str(tmp_path / "none"))


async def test_what_is_pinned_has_to_fit_the_hosts(command: Command, cluster: Cluster, tmp_path: Path) -> None:
    cluster.said = {name: HostModel(name, "stored", memory=2 << 39) for name in ("a", "b")}
    await cluster.write_host()
    assert "all pinned models fit" not in await command.run("add", "a", "--source", "org/a", "--pin")
    with pytest.raises(ModelDoesNotFit, match=r"a 1099\.5 GB would have to go"):
        await command.run("add", "b", "--source", "org/b", "--pin")
    await command.run("add", "b", "--source", "org/b")
    with pytest.raises(ModelDoesNotFit, match=r"all hosts have 1099\.5 GB together"):
        await command.run("set", "b", "--pin")
    said = " ".join((await command.run("add", "c", "--source", "org/c", "--pin")).split())
    assert "It is not known yet how much memory c will take" in said
    file = tmp_path / "models.yaml"
    file.write_text("models: [{name: d, source: org/d, pinned: true}, {name: b, source: org/b}]")
    said = " ".join((await command.run("apply", "-f", str(file))).split())
    assert "how much memory c, d will take" in said
    before = await cluster.registry.items()
    file.write_text("models: [{name: d, source: org/d}, {name: b, source: org/b, pinned: true}]")
    with pytest.raises(ModelDoesNotFit, match="would have to go"):
        await command.run("apply", "-f", str(file))
    assert await cluster.registry.items() == before


ADAPTED = """\
models:
- name: a
  source: org/a
  most: 1
  adapters:
    sql: /adapters/sql
    legal:
      source: org/legal
      revision: v2
"""


async def test_adapters_of_a_file_are_wanted_adopted_changed_and_taken_out(
    bus: Bus, command: Command, cluster: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(ADAPTED)
    names = await Bucket.open(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
    read = AdapterRecord("sql", "a", "/adapters/sql", "ab" * 32, 8, 400)
    await names.put("sql", read)
    said = await command.run("apply", "-f", str(file))
    assert said == "a: added\nlegal: adapter, added\nsql: adapter, unchanged\n"
    entries = await names.items()
    assert entries["sql"] == msgspec.structs.replace(read, origin="file")
    wanted = entries["legal"].wanted
    assert (wanted.model, wanted.source, wanted.revision) == ("a", "org/legal", "v2")
    assert await command.run("list", "--yaml") == ADAPTED.replace("sql: /adapters/sql\n    ", "") + (
        "    sql: /adapters/sql\n"
    )
    with pytest.raises(DeadlineExceeded, match="sql, legal could not be read"):
        await command.run("apply", "-f", str(file), "--wait", "--timeout", "0.3")
    error = msgspec.structs.replace(wanted, error="It is no adapter.")
    await names.put("legal", msgspec.structs.replace(entries["legal"], wanted=error))
    file.write_text(ADAPTED.replace("/adapters/sql", "org/sql"))
    said = await command.json("apply", "-f", str(file))
    changes = {"added": [], "changed": ["sql"], "unchanged": ["legal"], "removed": []}
    assert said["adapters"] == changes
    entries = await names.items()
    assert (entries["sql"].digest, entries["sql"].wanted is not None) == (read.digest, True)
    assert entries["legal"].wanted.error == "", "it is tried again"
    file.write_text(ADAPTED.replace("name: a", "name: legal"))
    with pytest.raises(ConfigurationError, match="The name 'legal' is taken by the model legal"):
        await command.run("apply", "-f", str(file))
    file.write_text(ADAPTED)
    with pytest.raises(ConfigurationError, match=r"(?s)model 'a' is declared twice.*'sql' is declared twice"):
        await command.run("apply", "-f", str(file), "-f", str(file))
    await command.run("add", "mine", "--source", "org/mine")
    file.write_text(ADAPTED.replace("sql:", "mine:"))
    with pytest.raises(ConfigurationError, match="The name 'mine' is taken by the model mine"):
        await command.run("apply", "-f", str(file))
    assert await names.items() == entries
    said = await command.run("apply", "-f", "-", text="models: [{name: a, source: org/a}]")
    assert said == "a: unchanged\nlegal: adapter, removed\nsql: adapter, removed\n"
    entries = await names.items()
    assert [(one.digest, one.wanted) for one in entries.values()] == [("", None)] * 2


def test_what_is_waited_for_is_said_in_words() -> None:
    wanted = WantedAdapter("base", "org/sql")
    record = AdapterRecord("sql", "base", "org/sql", "", 0, 0, wanted=wanted)
    now = ModelsSnapshot()
    assert "which is not in the registry" in now.adapter_waits(record)
    now.specs["base"] = ModelSpec("base", "org/base")
    assert "none is there" in now.adapter_waits(record)
    beat = HostBeat(takes_models=True)
    now.hosts["h"] = HostRecord("h", beat, "ready")
    assert now.adapter_waits(record) == "waits until a host has the files of its base base"
    fetching = HostModel("base", "downloading", done=1, total=4)
    now.hosts["h"] = HostRecord("h", msgspec.structs.replace(beat, models=[fetching]), "ready")
    assert now.adapter_waits(record) == "waits for its base base (downloading 25%)"
    now.groups["g"] = GroupRecord("g", "base", "ready", 1, [], GroupLoad(), "h")
    assert now.adapter_waits(record) == "is being read"
    failed = msgspec.structs.replace(record, wanted=msgspec.structs.replace(wanted, error="It is none."))
    assert now.adapter_waits(failed) == "could not be read and will be retried: It is none"
    assert now.adapter_waits(msgspec.structs.replace(record, wanted=None)) == ""
