"""`ryzanstein drain` and `undrain` on a local stack with the stub engine."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.stack import Stack, run_cli

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STUB = ("--engine", "stub", "--no-smoke-test", "--replicas", "2")
SLOW = {"RYZANSTEIN_STUB_STEP_MS": "20"}


def cli(stack: Stack, *arguments: str) -> tuple[int, str]:
    result = run_cli(*arguments, "--data-dir", str(stack.data_dir))
    return result.returncode, result.stdout + result.stderr


class Stream(threading.Thread):
    """One long answer, read to its end."""

    def __init__(self, stack: Stack, tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = f"{stack.url}/v1/completions"
        self._body = {"model": "stub", "prompt": "x", "max_tokens": tokens, "stream": True, "seed": 3}
        self._more = threading.Condition()
        self.text = ""
        self._left = False
        self.end = ""
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, trust_env=False, timeout=60) as response:
            for line in response.iter_lines():
                self.end = line or self.end
                if line.startswith("data: {"):
                    with self._more:
                        self.text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                        self._more.notify_all()
                if self._left:
                    return

    def reads(self, characters: int) -> bool:
        """Whether so many more come; a stub's token is one."""
        with self._more:
            wanted = len(self.text) + characters
            return self._more.wait_for(lambda: len(self.text) >= wanted, 30)

    def leave(self) -> None:
        """Who has seen enough closes the connection."""
        self._left = True
        self.join(60)

    def finish(self) -> str:
        self.join(60)
        assert self.end == "data: [DONE]", self.end
        return self.text


def running(stack: Stack) -> list[str]:
    """Groups that run a generation, as far as is known."""
    return [group["group"] for group in stack.status()["groups"] if group["running"]]


def group_of(stack: Stack) -> str:
    """The group that runs the only generation there is."""
    (found,) = running(stack)
    return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("drain"), *STUB, **SLOW) as running:
        yield running


def test_unknown_groups_are_named_with_those_that_are_there(stack: Stack, tmp_path: Path) -> None:
    for command in ("drain", "undrain"):
        code, said = cli(stack, command, "group-7")
        assert code == 1
        assert said.strip() == "error: There is no group group-7; the groups are: group-0, group-1."
    nowhere = run_cli("drain", "group-0", "--data-dir", str(tmp_path))
    assert nowhere.returncode == 1
    assert "No stack runs on the data directory" in nowhere.stderr


@pytest.mark.nightly
def test_a_drain_that_takes_longer_than_one_waits_says_what_is_left_and_can_be_taken_back(stack: Stack) -> None:
    stream = Stream(stack, 5000)
    assert stream.reads(1)
    while not (groups := running(stack)):
        pass
    (group,) = groups
    code, said = cli(stack, "drain", group, "--grace", "600", "--timeout", "1")
    assert code == 1
    lines = [line.split() for line in said.splitlines()]
    assert [group, "draining", "1", "0"] in [line[:4] for line in lines], said
    assert f"error: {group} has not left within 1 s; it goes on draining." in said

    code, said = cli(stack, "undrain", group)
    assert (code, said.strip()) == (0, f"{group} accepts requests again.")
    states = {one["group"]: one["state"] for one in stack.status()["groups"]}
    while states[group] == "draining":
        states = {one["group"]: one["state"] for one in stack.status()["groups"]}
    assert states[group] == "ready"
    assert stream.reads(50), "the generation goes on"
    assert group_of(stack) == group
    assert cli(stack, "drain", group, "--grace", "600", "--no-wait")[0] == 0
    assert cli(stack, "undrain", group)[0] == 0
    stream.leave()


def test_a_group_is_drained_and_its_generation_goes_on_elsewhere(stack: Stack) -> None:
    """The last one here: the group has left for good."""
    undisturbed = Stream(stack, 300).finish()
    while running(stack):
        pass  # the monitor writes what it hears each second
    stream = Stream(stack, 300)
    assert stream.reads(1)
    while not (groups := running(stack)):
        pass
    (group,) = groups
    code, said = cli(stack, "drain", group, "--grace", "0.2")
    assert code == 0, said
    assert f"{group} has left." in said
    assert stream.finish() == undisturbed
    stack.read_until("was drained and has left.")

    code, said = cli(stack, "drain", group)
    assert code == 1
    assert said.startswith(f"error: The group {group} has left (")
    assert "start its executor to have it back" in said
