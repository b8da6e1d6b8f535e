"""Services keep their ports from one start of a stack to the next, as far as these are free."""

import socket
from pathlib import Path

import pytest

from services.cli.supervision.stack import reserve_ops_ports

HOST = "127.0.0.1"


def chosen(names: list[str], path: Path) -> dict[str, int]:
    sockets, ports = reserve_ops_ports(HOST, names, path)
    for sock in sockets:
        sock.close()
    return ports


def test_ports_stay_the_same_and_none_that_is_taken_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    first = chosen(["scheduler-0", "executor-0"], path)
    assert len(set(first.values())) == 2
    assert chosen(["executor-0"], path) == {"executor-0": first["executor-0"]}
    with socket.create_server((HOST, first["executor-0"])):
        second = chosen(["executor-0", "scheduler-0", "executor-1"], path)
    assert second["scheduler-0"] == first["scheduler-0"]
    assert len({*second.values(), first["executor-0"]}) == 4
    assert chosen(["executor-0"], path)["executor-0"] == second["executor-0"]


@pytest.mark.parametrize("content", ["", "[1]", '{"executor-0": 70000}', '{"executor-0": "x"}'])
def test_what_is_no_list_of_ports_counts_for_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ports.json"
    path.write_text(content)
    assert chosen(["executor-0"], path)["executor-0"] > 0
    assert chosen(["executor-0"], tmp_path / "nowhere" / "ports.json")
