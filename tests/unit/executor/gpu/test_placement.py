"""Which GPU a rank takes, without one."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from services.executor.core.settings import ExecutorSettings
from services.executor.platforms.catalog import choose_device
from services.executor.platforms.cuda import bind_to_numa_node, parse_cores
from shared.config import load_settings
from shared.errors import ConfigurationError


def host_with(monkeypatch: pytest.MonkeyPatch, gpus: int) -> list[torch.device]:
    """As torch sees it; returns what is made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize(
    ("changes", "rank", "index"),
    [({"tp": 4}, 3, 3), ({"tp": 1}, 0, 0), ({"tp": 4, "nnodes": 2}, 3, 1), ({"tp": 4, "nnodes": 2}, 2, 0)],
    ids=str,
)
def test_each_rank_takes_the_gpu_of_its_place_on_its_host(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], rank: int, index: int
) -> None:
    current = host_with(monkeypatch, 4)
    more = {"master_addr": "10.0.0.1", "ring_secret": "s"} if "nnodes" in changes else {}
    settings = load_settings(ExecutorSettings, device="auto", **changes, **more)
    assert choose_device(settings, rank) == torch.device("cuda", index)
    assert current == [torch.device("cuda", index)]


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 4), ("auto", 0)])
def test_the_cpu_where_it_was_asked_for_or_there_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int
) -> None:
    host_with(monkeypatch, gpus)
    assert choose_device(load_settings(ExecutorSettings, device=device), 0) == torch.device("cpu")


def test_too_few_gpus_are_told_with_what_hides_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    host_with(monkeypatch, 2)
    with pytest.raises(ConfigurationError, match=r"has 2 \(CUDA_VISIBLE_DEVICES=0,1\); use a smaller --tp"):
        choose_device(load_settings(ExecutorSettings, device="cuda", tp=4), 0)
    host_with(monkeypatch, 0)
    with pytest.raises(ConfigurationError, match="torch sees no GPU"):
        choose_device(load_settings(ExecutorSettings, device="cuda"), 0)


@pytest.mark.parametrize(
    ("listing", "allowed", "kept"),
    [
        ("4-7,12", [0, 4, 5, 12], [4, 5, 12]),
        ("4-7", [0, 1], None),
        ("0-3", [0, 1], None),
        ("", [0, 1], None),
        (None, [0, 1], None),
    ],
    ids=str,  # of lists: sets are written in an order that compiled modules do not keep
)
def test_a_rank_stays_on_the_cores_near_its_gpu_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listing: str | None, allowed: list[int], kept: list[int] | None
) -> None:
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(allowed))
    chosen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: chosen.append(cores))
    if listing is not None:
        (tmp_path / "0000:1a:00.0").mkdir()
        (tmp_path / "0000:1a:00.0" / "local_cpulist").write_text(listing + "\n")
    bind_to_numa_node(torch.device("cuda", 0), tmp_path)
    assert chosen == ([] if kept is None else [set(kept)])


def test_sets_of_cores_as_the_kernel_writes_them() -> None:
    assert parse_cores("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert parse_cores("\n") == set()
