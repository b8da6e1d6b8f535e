"""W3C Trace Context: what is read, what is as good as not sent. And that nothing of it costs where it is off."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.tracing import NONE, TraceContext, active, begin, current, enabling_variable, from_headers, on, parse, stage

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
hexadecimal = st.text("0123456789abcdef", min_size=1)


@given(st.text("0123456789abcdef", min_size=32, max_size=32), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_what_is_written_is_read(trace_id: str, span: int, flags: int) -> None:
    if not int(trace_id, 16):
        return
    context = TraceContext(trace_id, f"{span:016x}", flags)
    assert parse(context.traceparent) == context
    assert context.sampled == bool(flags & 1)


@given(st.text() | st.none() | st.integers() | st.binary(), st.text() | st.none() | st.integers())
def test_anything_may_come(traceparent: object, tracestate: object) -> None:
    assert parse(traceparent, tracestate) is None
    found = parse(f"00-{TRACE}-{SPAN}-01", tracestate)
    assert found.state == "" or isinstance(tracestate, str)


@pytest.mark.parametrize(
    "given",
    [
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_what_is_malformed_is_none(given: str) -> None:
    assert parse(given) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert parse(f"01-{TRACE}-{SPAN}-01-what the future brings") == TraceContext(TRACE, SPAN)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("a=1", "a=1"),
        (" a=1 , b=2,, ", "a=1,b=2"),
        ("tenant@vendor=x y", "tenant@vendor=x y"),
        ("a=1,a=2", ""),
        ("A=1", ""),
        ("a=1,b", ""),
        (",".join(f"k{n}=v" for n in range(33)), ""),
        (f"a={'x' * 600}", ""),
    ],
)
def test_tracestate_is_taken_whole_or_not(given: str, kept: str) -> None:
    found = parse(f"00-{TRACE}-{SPAN}-01", given)
    assert found.state == kept


def test_headers_are_read_as_the_specification_says() -> None:
    parent = (b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())
    assert from_headers([parent]) == TraceContext(TRACE, SPAN)
    assert from_headers([parent, parent]) is None
    states = [(b"tracestate", b"a=1"), (b"other", b"x"), (b"tracestate", b"b=2")]
    assert from_headers([parent, *states]) == TraceContext(TRACE, SPAN, 1, "a=1,b=2")
    assert from_headers(states) is None
    assert from_headers([(b"traceparent", b"\xff")]) is None


def test_off_nothing_is_recorded_or_active() -> None:
    assert not on()
    with begin("a", TraceContext(TRACE, SPAN)) as span, active(span), stage("b") as inner:
        assert span is inner is current() is NONE
    assert (NONE.recording, NONE.traceparent, NONE.context) == (False, "", None)


@pytest.mark.parametrize(
    ("environment", "by"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/v1/traces"}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, ""),
    ],
)
def test_opentelemetrys_own_variables_turn_it_on(environment: dict[str, str], by: str) -> None:
    assert enabling_variable(environment) == by


SERVICES = (
    "services.gateway.service",
    "services.gateway.api.grpc.api",
    "services.scheduler.service",
    "services.health_monitor.service",
    "services.executor.supervisor.service",
    "services.executor.rank",
    "services.executor.leader.leader",
)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, check=False
    )


def test_off_no_process_imports_opentelemetry() -> None:
    imports = "; ".join(f"import {name}" for name in SERVICES)
    code = f"import sys; {imports}; from shared import tracing; assert not tracing.configure('a', 'b'); "
    code += "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = run_python(code, OTEL_EXPORTER_OTLP_ENDPOINT="")
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_without_the_package_one_sentence_says_so() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None; from shared import tracing; "
        "from shared.service.logs import configure_logging; configure_logging('a', 'b', level='info', fmt='json'); "
        "assert not tracing.configure('a', 'b'); assert not tracing.on()"
    )
    done = run_python(code, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but opentelemetry is not installed" in done.stderr
    assert "ryzanstein[tracing]" in done.stderr


def test_settings_that_are_wrong_are_one_sentence() -> None:
    code = (
        "from shared import tracing; from shared.service.logs import configure_logging; "
        "configure_logging('a', 'b', level='info', fmt='json'); assert not tracing.configure('a', 'b')"
    )
    where = "http://127.0.0.1:9"
    done = run_python(code, OTEL_EXPORTER_OTLP_ENDPOINT=where, OTEL_BSP_MAX_QUEUE_SIZE="-1")
    assert done.returncode == 0, done.stderr
    assert "OTEL_BSP_MAX_QUEUE_SIZE is -1 and must be above 0" in done.stderr
    assert "Traceback" not in done.stderr
