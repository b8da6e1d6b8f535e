"""NVIDIA Dynamo on one machine: its frontend, and its worker around vLLM, which ends both when it ends.

Runs in Dynamo's environment, where nothing of this repository is installed: a script, not a module. What follows `--`
is the worker's.

    python dynamo_stack.py --port 8000 --store FOLDER -- --model DIR --dtype bfloat16
"""

import argparse
import os
import subprocess
import sys
import types

# Of images alone: transformers takes it from torchvision, whose build beside a torch for CPUs is not on PyPI.
_IMAGES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_WORKER = "--worker"


def run_worker(arguments: list[str]) -> None:
    """In this process."""
    module = types.ModuleType(_IMAGES)
    module.smart_resize = None  # type: ignore[attr-defined]
    sys.modules[_IMAGES] = module
    from dynamo.vllm.main import main

    sys.argv = ["dynamo.vllm", *arguments]
    main()


def run_stack(host: str, port: int, store: str, arguments: list[str]) -> int:
    """The exit code of the first that ends."""
    # As on one machine: discovery by files, so that no etcd is needed.
    os.environ.update(DYN_DISCOVERY_BACKEND="file", DYN_FILE_KV=store, DYN_REQUEST_PLANE="tcp", DYN_EVENT_PLANE="zmq")
    commands = [
        ["-m", "dynamo.frontend", "--http-host", host, "--http-port", str(port)],
        [__file__, _WORKER, *arguments],
    ]
    running = {each.pid: each for each in (subprocess.Popen([sys.executable, *command]) for command in commands)}
    pid, status = os.wait()
    for other in running.values():
        if other.pid != pid:
            other.terminate()
            other.wait()
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--store", required=True, help="A folder for what its processes find each other by.")
    parser.add_argument("arguments", nargs="*", help="Of the worker.")
    options = parser.parse_args()
    raise SystemExit(run_stack(options.host, options.port, options.store, options.arguments))


if __name__ == "__main__":
    if sys.argv[1:2] == [_WORKER]:
        run_worker(sys.argv[2:])
    else:
        main()
