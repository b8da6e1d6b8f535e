"""The runbooks' commands are run on a local stack, and their queries judged by promtool."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from services.cli.target import nats_of_stack
from shared.messages import ServiceRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.alerts import rules, runbooks
from tests.alerts.test_rules import run_promtool
from tests.e2e.stack import Stack

# Prometheus' own, and what only a gateway with TLS tells (tests/integration/gateway/server/test_tls.py).
ELSEWHERE = {"up", "ryzanstein_gateway_certificate_expiry_timestamp_seconds"}
SERVICES = {"gateway", "scheduler", "health-monitor", "executor"}
SUFFIXES = ("", "_total", "_bucket", "_count", "_sum")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """As many groups as may be drained, and one that stays."""
    groups = str(len(runbooks.commands("drains")) + 1)
    directory = tmp_path_factory.mktemp("runbooks")
    with Stack(directory, "--engine", "stub", "--no-smoke-test", "--replicas", groups) as stack:
        yield stack


@pytest.mark.slow
@pytest.mark.e2e
def test_what_rules_and_runbooks_read_is_told_by_the_services(stack: Stack) -> None:
    told = asyncio.run(families(stack))
    read = {name for rule in rules.rules(rules.load()) for name in rules.names_in(rule["expr"])}
    read |= {name for query in runbooks.queries() for name in rules.names_in(query)}
    wanted = {name for name in read if ":" not in name} - ELSEWHERE
    missing = {name for name in wanted if not any(name.removesuffix(end) in told for end in SUFFIXES)}
    assert missing == rules.PENDING, "tell them, or take what is told out of PENDING"


async def families(stack: Stack) -> set[str]:
    """Names of all metrics of all services, without suffixes of counters."""
    bus = await Bus.connect(nats_of_stack(stack.data_dir, ""), "test")
    try:
        bucket = await Bucket.open(bus, subjects.SERVICES_BUCKET, ServiceRecord)
        records = await ready_of_each_kind(bucket)
    finally:
        await bus.close()
    found: set[str] = set()
    async with httpx.AsyncClient(trust_env=False) as http:
        for record in records:
            text = (await http.get(f"http://{record.address}/metrics")).raise_for_status().text
            found |= {name.removesuffix("_total") for name in re.findall(r"(?m)^# TYPE (\S+)", text)}
    return found


async def ready_of_each_kind(bucket: Bucket[ServiceRecord]) -> list[ServiceRecord]:
    """The health monitor may hear a moment later than the stack that a service is ready."""
    async with asyncio.timeout(60):
        while True:
            ready = [record for record in (await bucket.items()).values() if record.state == "ready"]
            if {record.name for record in ready} >= SERVICES:
                return ready


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_commands_that_runbooks_name_work_on_a_local_stack(stack: Stack, tmp_path: Path) -> None:
    program = tmp_path / "ryzanstein"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m services.cli "$@"\n')
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RYZANSTEIN_DATA_DIR": str(stack.data_dir),
        "GATEWAY": stack.url,
        "MODEL": "stub",
        "LOGS": str(stack.data_dir / "logs"),
        "NATS_LOG": str(next(stack.data_dir.glob("**/nats.log"))),
        "NATS_STORE": str(next(stack.data_dir.glob("**/store"))),
        "no_proxy": "*",
    }
    failed = []

    def group_for(command: str) -> dict[str, str]:
        """Those that name no group need not wait for one to be asked for."""
        return {"GROUP": ready_group(stack)} if "$GROUP" in command else {}

    for kind in runbooks.RUN:
        for command, runbook in runbooks.commands(kind).items():
            result = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                env={**environment, **group_for(command)},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            if result.returncode:
                failed.append(f"{runbook}: {command}\n{result.stdout}{result.stderr}")
    assert not failed, "\n".join(failed)


def ready_group(stack: Stack) -> str:
    return str(next(group["group"] for group in stack.status()["groups"] if group["state"] == "ready"))


def test_every_block_is_of_a_known_kind() -> None:
    kinds = {(block.language, block.kind) for block in runbooks.blocks()}
    assert kinds <= {("promql", "")} | {("sh", kind) for kind in (*runbooks.RUN, *runbooks.NOT_RUN)}


def test_each_runbook_has_something_to_run() -> None:
    ran = {block.runbook for block in runbooks.blocks() if block.language == "sh" and block.kind in runbooks.RUN}
    assert ran == {rules.kebab(alert["alert"]) for alert in rules.alerts(rules.load())}


def test_queries_can_be_read(tmp_path: Path) -> None:
    recorded = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(runbooks.queries())]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}))
    run_promtool("check", "rules", str(path))


def test_links_lead_somewhere() -> None:
    for path in runbooks.RUNBOOKS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
