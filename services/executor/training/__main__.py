"""The process that trains: `python -m services.executor.training EVENTS_FD`, started by an executor.

Standard input brings its specification and later `pause`; its end ends the process (`ipc/trainer_pipe.py`). It gives
way to everything else on the host: it is scheduled only when a core has nothing else to do, is the first one that the
kernel ends where memory runs out, and is suspended while interactive requests run
(`supervisor/trainings/suspension.py`).
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

from shared.process import die_with_parent

_LOWEST_PRIORITY = 19
_FIRST_TO_GO = "900"  # of 1,000: how willingly the kernel ends this process where memory runs out
_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS: the same sums in every run
    "MKL_DYNAMIC": "FALSE",  # and no fewer threads than were asked for: other threads, other sums
    "OMP_DYNAMIC": "FALSE",
}


def give_way() -> None:
    """Before any thread is started, and PyTorch starts some: they inherit it."""
    arm = die_with_parent(signal.SIGKILL)
    if arm is not None:
        arm()
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux, or forbidden by the container
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)


def main(events_fd: int) -> int:
    """`events_fd`: where its events go. Returns the exit code: 0 where the job is trained, or paused as was wanted."""
    give_way()
    from services.executor.training.trainer.process import run

    return run(sys.stdin.buffer, events_fd)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # threads of PyTorch must not hold up a process that is done
