"""The stack of compose/ in a Docker engine, under a name, ports, volumes and secrets of the test's own."""

import json
import os
import secrets
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from testcontainers.compose import DockerCompose

FOLDER = Path(__file__).parents[2] / "compose"
# Names a file of variables for the stack, such as bases that were imported and where torch comes from.
MORE_SETTINGS = "RYZANSTEIN_TEST_COMPOSE_ENV"
# Kills what the container's first process has started: the service, as a fault of its own would.
CRASH = (
    "import os, pathlib, signal\n"
    "for stat in pathlib.Path('/proc').glob('[0-9]*/stat'):\n"
    "    if stat.read_text().rpartition(')')[2].split()[1] == '1':\n"
    "        os.kill(int(stat.parent.name), signal.SIGKILL)\n"
)


def why_no_engine() -> str:
    """Why there is no stack to test; empty where a Docker engine answers, and Compose is there."""
    if shutil.which("docker") is None:
        return "there is no program docker"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        if ended.returncode:
            said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
            return f"`{' '.join(command)}` says: {said[-1]}"
    return ""


class ComposeStack:
    """Use as a context manager: what was started is taken down, with its volumes."""

    def __init__(self, directory: Path, models: Path, *profiles: str) -> None:
        ports = ("PORT", "GRPC_PORT", "PORT_2", "GRPC_PORT_2", "PROMETHEUS_PORT")
        variables = {
            "COMPOSE_PROJECT_NAME": f"ryzanstein-test-{secrets.token_hex(4)}",
            "MODELS": str(models),
            "OTEL_EXPORTER_OTLP_ENDPOINT": "",  # nobody collects
            **{name: str(port) for name, port in zip(ports, _free_ports(len(ports)), strict=True)},
        }
        own = directory / "test.env"
        own.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
        files = [str(FOLDER / ".env"), *filter(None, [os.environ.get(MORE_SETTINGS)]), str(own)]
        self._compose = DockerCompose(FOLDER, profiles=[*profiles], env_file=files)
        self._everything = DockerCompose(FOLDER, profiles=["*"], env_file=files)

    def __enter__(self) -> "ComposeStack":
        try:
            self.up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._everything, "down", "--volumes", "--timeout", "10")

    def up(self, *services: str) -> None:
        """Starts those that do not run, by default all of the profiles'; returns once they are healthy."""
        self.run("up", "--wait", "--quiet-pull", *services)

    def url(self, service: str, port: int) -> str:
        host, published = self._everything.get_service_host_and_port(service, port)
        return f"http://{host}:{published}"

    def logs(self, *services: str) -> str:
        return self._everything.get_logs(*services)[0]

    def kill(self, service: str) -> None:
        """The whole container, which the engine then leaves alone."""
        self.run("kill", service)

    def crash(self, service: str) -> None:
        """The service within its container, which its restart policy brings back."""
        self.run("exec", "-T", service, "python3", "-c", CRASH, codes=(0, 137))

    def state(self, service: str) -> tuple[int, str]:
        """How often the engine has started its container again, and whether it is healthy."""
        container = self._everything.get_container(service, include_all=True)
        ended = subprocess.run(["docker", "inspect", str(container.ID)], capture_output=True, text=True, check=True)
        (found,) = json.loads(ended.stdout)
        return found["RestartCount"], found["State"]["Health"]["Status"]

    def commands(self, *arguments: str) -> Any:
        """What an operator's command says, for machines."""
        return json.loads(self.run("run", "--rm", "-T", "cli", *arguments))

    def run(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        """What `docker compose` prints."""
        return self._run(self._compose, *arguments, codes=codes)

    def _run(self, compose: DockerCompose, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        command = [*compose.docker_compose_command(), *arguments]
        ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
        assert ended.returncode in codes, f"{arguments}: {ended.stderr}\n{self.logs()[-20_000:]}"
        return ended.stdout


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
