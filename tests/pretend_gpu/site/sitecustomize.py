"""With this directory on PYTHONPATH, the processes of ranks pretend to have a GPU, from their first line on."""

import os
import sys

if {"services.executor.rank", "services.executor.supervisor.ranks.fork_server"} & {*sys.orig_argv}:
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.pretend_gpu.device import pretend_gpu

    pretended = pretend_gpu()  # kept: it ends with what holds it
    pretended.__enter__()
