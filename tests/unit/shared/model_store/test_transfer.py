"""Files that are cut, delayed, changed and refused on their way from a hub on this machine."""

import asyncio
import signal
import threading
from pathlib import Path

import msgspec
import psutil
import pytest

from shared.errors import ConfigurationError, InternalError, ModelLoadError
from shared.model_store import hub as hub_module
from shared.model_store import preparation, transfer
from shared.model_store.catalog import ensure_adapter
from shared.model_store.locks import partial
from shared.model_store.repository import PARTS
from shared.model_store.settings import Store
from tests.unit.shared.model_store.hub_server import HubServer, Repository

Hub = type[HubServer]
WEIGHTS = "adapter_model.safetensors"
CONTENT = bytes(range(256)) * 4096
# The smallest repository there is; a model's goes the same way.
FILES = {"adapter_config.json": b'{"r": 8}', WEIGHTS: CONTENT}


@pytest.fixture
def served(hub: Hub) -> Hub:
    hub.repositories["org/name"] = Repository(FILES)
    return hub


def fetch(store: Store, revision: str = "") -> bytes:
    directory = ensure_adapter("org/name", store, lambda *step: None, revision=revision)
    return (directory / WEIGHTS).read_bytes()


def parts(store: Store) -> list[Path]:
    held = partial(store.cache / ".hub-adapters" / "org--name") / PARTS
    return [path for path in held.iterdir() if len(path.name) == 32] if held.is_dir() else []


def test_a_connection_that_is_cut_is_continued_where_it_was(served: Hub, store: Store) -> None:
    served.faults.cut_after[WEIGHTS] = [1000, 500_000, 1, 0, 0, 7]
    assert fetch(store) == CONTENT
    assert served.sent[WEIGHTS] == len(CONTENT), "no byte twice"


class FirstAnswer(threading.Event):
    """Shut for one answer alone."""

    def wait(self, timeout: float | None = None) -> bool:
        HubServer.faults.gate = None
        return super().wait(timeout)


def test_a_server_that_falls_silent_is_asked_again(served: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    served.repositories["org/name"] = Repository({"adapter_config.json": b"", WEIGHTS: CONTENT})
    gate = served.faults.gate = FirstAnswer()
    try:
        assert fetch(store) == CONTENT
        assert served.begun.count((WEIGHTS, len(CONTENT) // 2)) == 1
    finally:
        gate.set()


def test_a_server_that_ignores_ranges_is_begun_with_again(served: Hub, store: Store) -> None:
    served.faults.ignores_ranges = True
    served.faults.cut_after[WEIGHTS] = [600_000]
    assert fetch(store) == CONTENT
    assert served.sent[WEIGHTS] == len(CONTENT) + 600_000


def test_a_server_that_brings_nothing_new_is_given_up(served: Hub, store: Store) -> None:
    served.faults.cut_after[WEIGHTS] = [5000] + [0] * 20
    with pytest.raises(ConfigurationError, match=r"org/name .* could not be fetched from http://127"):
        fetch(store)
    assert len(served.faults.cut_after[WEIGHTS]) == 21 - transfer.ATTEMPTS
    served.faults.cut_after.clear()
    assert fetch(store) == CONTENT
    assert served.sent[WEIGHTS] == len(CONTENT), "what had come was kept"


@pytest.mark.parametrize(
    "statuses",
    [
        [(503, {}), (500, {}), (502, {})],
        [(429, {"Retry-After": "0"}), (429, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})],
    ],
)
def test_errors_that_pass_are_waited_for(served: Hub, store: Store, statuses: list[tuple[int, dict[str, str]]]) -> None:
    served.faults.statuses = {WEIGHTS: list(statuses), "": statuses[:2]}
    assert fetch(store) == CONTENT


def test_errors_that_last_are_said(served: Hub, store: Store) -> None:
    served.faults.statuses[WEIGHTS] = [(429, {"Retry-After": "86400"})]
    with pytest.raises(ConfigurationError, match="429"):
        fetch(store)
    served.faults.statuses[""] = [(500, {})] * transfer.ASKED
    with pytest.raises(ConfigurationError, match="500"):
        fetch(store)
    assert fetch(store) == CONTENT


def test_waiting_is_as_long_as_the_server_asks() -> None:
    class Refused(Exception):
        class response:  # noqa: N801
            status_code = 429
            headers = {"Retry-After": "17"}

    retries = transfer.Retries()
    assert retries.pause_after(Refused()) == 17
    assert [retries.pause_after(OSError()) for _ in range(3)] == [2, 4, 8]
    retries.succeeded()
    assert retries.pause_after(OSError()) == 1


@pytest.mark.parametrize("path", FILES)
def test_other_bytes_are_fetched_again_once_and_never_used(served: Hub, store: Store, path: str) -> None:
    wrong = b"x" * len(FILES[path])
    served.faults.contents[path] = [wrong]
    assert fetch(store) == CONTENT
    served.faults.contents[path] = [wrong, wrong]
    with pytest.raises(ModelLoadError, match=rf"{path} is not what the hub lists, by its SHA-256 or Git digest"):
        fetch(store, "main")
    assert not list(store.cache.rglob(f"*main*/{path}"))
    assert fetch(store, "main") == CONTENT


def test_a_part_that_was_damaged_on_the_disk_is_found_out(served: Hub, store: Store) -> None:
    served.faults.cut_after[WEIGHTS] = [500_000] + [0] * transfer.ATTEMPTS
    with pytest.raises(ConfigurationError):
        fetch(store)
    (part,) = (path for path in parts(store) if path.stat().st_size)
    part.write_bytes(bytes(500_000))
    assert fetch(store) == CONTENT


def test_sizes_that_lie_are_found_out(served: Hub, store: Store) -> None:
    served.faults.contents[WEIGHTS] = [CONTENT * 2]
    with pytest.raises(ModelLoadError, match=f"More than the {len(CONTENT)} bytes come"):
        fetch(store)
    assert all(path.stat().st_size <= len(CONTENT) for path in parts(store))
    served.faults.contents[WEIGHTS] = [CONTENT[:1000]] * 20
    with pytest.raises(ModelLoadError, match=rf"Only \d+ of the {len(CONTENT)} bytes of {WEIGHTS} come"):
        fetch(store)
    served.faults.contents.clear()
    assert fetch(store) == CONTENT


def test_a_file_that_has_changed_meanwhile_is_not_mixed_with_what_came_before(served: Hub, store: Store) -> None:
    served.faults.cut_after[WEIGHTS] = [500_000] + [0] * transfer.ATTEMPTS
    with pytest.raises(ConfigurationError):
        fetch(store)
    changed = CONTENT[::-1]
    served.faults.cut_after.clear()
    served.repositories["org/name"] = Repository({**FILES, WEIGHTS: changed})
    assert fetch(store) == changed


def test_a_mirror_without_digests_has_its_sizes_checked(served: Hub, store: Store) -> None:
    listed = [{"rfilename": path, "size": len(data)} for path, data in FILES.items()]
    served.repositories["org/name"] = Repository(FILES, listed=listed)
    served.faults.cut_after[WEIGHTS] = [1000]
    assert fetch(store) == CONTENT


def test_files_come_together_and_no_more_than_may(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two have begun while neither can end, and a third begins only then."""
    monkeypatch.setattr(transfer, "_INTERVAL", 0.01)
    files = {f"{number}.json": b"{}" * 1000 for number in range(6)}
    served.repositories["org/name"] = Repository(files)
    gate = served.faults.gate = threading.Event()
    seen: list[int] = []

    def report(stage: str, done: int, total: int) -> None:
        if not gate.is_set() and done:
            seen.append(len(served.fetched))
            if len(seen) > 20 or len(served.fetched) > 2:
                gate.set()

    store = Store(tmp_path / "cache", downloads=2)
    repository = hub_module.Repository("org/name", "", tmp_path / "made", store, report, lambda count: None)
    repository.fetch(repository.files)
    assert max(seen) == 2
    assert all((tmp_path / "made" / path).read_bytes() == data for path, data in files.items())


class Half:
    """Told by a download's progress when the first half of the weights has come."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.last = ("", 0, 0)

    def report(self, *step: object) -> None:
        self.last = step  # type: ignore[assignment]
        if self.last[1] >= len(CONTENT) // 2:
            self.reached.set()


def preparing() -> list[psutil.Process]:
    """Our processes that fetch; what has ended and was not waited for yet has no command line."""
    ours = psutil.Process().children(recursive=True)
    return [
        process
        for process in ours
        if process.status() != psutil.STATUS_ZOMBIE and "shared.model_store.preparation" in process.cmdline()
    ]


@pytest.mark.slow
async def test_a_process_that_is_killed_is_continued_where_it_was(served: Hub, store: Store) -> None:
    """SIGKILL in the middle; the second process fetches what the first has not, and a third waits for it."""
    gate = served.faults.gate = threading.Event()
    half = Half()
    first = asyncio.create_task(preparation.prepare_adapter("org/name", store, half.report))
    await half.reached.wait()
    (process,) = preparing()
    process.send_signal(signal.SIGKILL)
    with pytest.raises(InternalError, match="could not be made ready"):
        await first
    held = max(path.stat().st_size for path in parts(store))
    served.begun.clear()
    gate.set()
    served.faults.gate = None
    one, other = await asyncio.gather(
        preparation.prepare_adapter("org/name", store, half.report),
        preparation.prepare_adapter("org/name", store, lambda *step: None),
    )
    assert one == other
    assert (one / WEIGHTS).read_bytes() == CONTENT
    assert sorted(served.begun) == [("adapter_config.json", 4), (WEIGHTS, held)], (
        "no byte was fetched again, nor by both"
    )
    assert held >= len(CONTENT) // 2


@pytest.mark.slow
async def test_a_download_is_cancelled_and_continued(served: Hub, store: Store) -> None:
    gate = served.faults.gate = threading.Event()
    half = Half()
    task = asyncio.create_task(preparation.prepare_adapter("org/name", store, half.report))
    await half.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not preparing()
    gate.set()
    served.faults.gate = None
    assert fetch(store) == CONTENT


def test_a_full_disk_is_said(served: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "part")

    monkeypatch.setattr(transfer._Part, "write", full)
    with pytest.raises(ConfigurationError, match=r"cannot store the model org/name \(No space left on device: part\)"):
        fetch(msgspec.structs.replace(store, downloads=1))
