"""A stack that `ryzanstein launch` starts where none runs: `ryzanstein up` as a process of its own, with its output in
a log, which ends with the client."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from services.cli.target import RunFile, read_run_file
from shared.errors import ConfigurationError
from shared.process import die_with_parent

_PAUSE = 0.2  # seconds between two looks at whether it is up
_STOPPED_WITHIN = 40.0  # seconds


@contextlib.contextmanager
def started_stack(data_dir: Path, model: str, tell: Callable[[str], None]) -> Iterator[RunFile]:
    """Runs a stack of `model` (empty: the built-in one) for the block. Raises `ConfigurationError` where it does not
    come up, with what it said last."""
    log = data_dir / "launch" / "stack.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "services.cli", "up", "--no-smoke-test", "--data-dir", str(data_dir)]
    command += ["--model", model] if model else []
    tell(f"No stack runs here; starting one, its output is in {log}")
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  # our own words
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the client's
            preexec_fn=die_with_parent(),
        )
    try:
        yield _up(process, data_dir, log)
    finally:
        _stop(process)


def _up(process: "subprocess.Popen[bytes]", data_dir: Path, log: Path) -> RunFile:
    while process.poll() is None:
        if (found := read_run_file(data_dir)) is not None and found.pid == process.pid:
            return found
        time.sleep(_PAUSE)
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = said[-1].removeprefix("error: ") if said else "it said nothing"
    raise ConfigurationError(f"The stack did not start: {last}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOPPED_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
