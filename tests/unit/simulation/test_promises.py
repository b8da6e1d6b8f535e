"""Each promise is kept by a history in which nothing is wrong, and fires on one that was doctored."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.executor.worker.stub import stub_token
from shared.messages import GenerationRequest, ModelLease, SamplingParams, TokenEntry, TokenFrame
from shared.messages.batches import BatchJob
from shared.messages.records import GenerationRecord, GenerationRecords, Ownership
from tests.chaos.expected import stub_text
from tests.simulation.clients.history import (
    Acknowledged,
    BatchSeen,
    Filled,
    History,
    JobSeen,
    KeySeen,
    Request,
    Try,
    Wanted,
)
from tests.simulation.promises.all import KINDS, promises
from tests.simulation.promises.evidence import Evidence, Fault, Holdings, Reading
from tests.simulation.promises.promise import Watch

IDENTITY = "0" * 8 + "1" * 8 + "2" * 16
OTHER = "0" * 8 + "1" * 8 + "3" * 16
DELETED = b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n"


def stream(**changes: Any) -> Request:
    """One that was answered rightly, at its second gateway."""
    text = stub_text(7, 12)
    made = Request("stream-1", "stream", 1, {"seed": 7}, Wanted(text, 12), 10.0)
    made.identity, made.text, made.finish = f"chatcmpl-{IDENTITY}", text, "length"
    made.usage, made.ended, made.outcome = {"completion_tokens": 12}, 12.0, "answered"
    made.tries = [
        Try(10.0, "gateway-1:8000", until=11.0, ending="lost"),
        Try(11.0, "gateway-2:8000", resumes=True, until=12.0, ending="ended"),
    ]
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def keyed(**changes: Any) -> Request:
    return stream(**{"kind": "keyed", "key": "k", "identity": f"chatcmpl-{IDENTITY}", **changes})


def response(text: str) -> Request:
    """Its seed stands in its record alone."""
    return stream(identity=f"resp_{IDENTITY}", wanted=Wanted(None, 12), text=text, usage=None)


def with_logprobs(count: int, value: float = 0.0) -> Request:
    found = [{"token": letter, "logprob": value} for letter in stub_text(7, 12)[:count]]
    return stream(wanted=Wanted(stub_text(7, 12), 12, logprobs=True), logprobs=found)


def refused(code: str, status: int = 503, **changes: Any) -> Request:
    tried = Try(100.0, "gateway-1:8000", until=100.1, ending="refused", status=status, code=code)
    return stream(started=100.0, ended=101.0, tries=[tried], **changes)


def refused_later(code: str, status: int, *, replaced: bool = False) -> Request:
    tried = Try(300.0, "gateway-1:8000", until=300.1, ending="refused", status=status, code=code)
    tried.replaced = replaced
    return stream(started=300.0, ended=301.0, tries=[tried])


def batch(**changes: Any) -> BatchSeen:
    wanted = {f"line-{number}": stub_text(number, 5) for number in range(3)}
    lines = [
        {"custom_id": name, "response": {"body": {"choices": [{"text": text}]}}, "error": None}
        for name, text in wanted.items()
    ]
    made = BatchSeen("batches-1", "batch_1", "", wanted, started=10.0, ended=60.0, status="completed")
    made.statuses, made.counts, made.output = (["validating", "in_progress", "completed"], {"completed": 3}, lines)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def struck(code: str) -> BatchSeen:
    """Its last line is fatal."""
    *output, last = batch().output
    response = {"status_code": 400, "body": {"error": {"code": code}}}
    errors = [{"custom_id": last["custom_id"], "response": response, "error": None}]
    return batch(output=output, errors=errors, counts={"completed": 2}, fatal="line-2", identity="batch_2")


def beside_a_flood(**changes: Any) -> list[Request]:
    flood = stream(kind="flooding", tenant="a", started=1000.0, ended=1100.0)
    return [flood, stream(**{"tenant": "b", "started": 1010.0, "ended": 1012.0, **changes})]


def job(**changes: Any) -> JobSeen:
    made = JobSeen("training-1", "ftjob-1", "", 5, 6, started=10.0, ended=300.0, status="succeeded")
    made.statuses, made.model, made.results = ["validating_files", "running", "succeeded"], "ft:a", ["file-1"]
    made.digest, made.names_of_adapters, made.steps = "ab" * 32, ["ft:a"], [1, 2, 3]
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def record(identity: str = IDENTITY, *, seed: int = 7, key: str = "", request_id: str = "req-1") -> bytes:
    sampling = SamplingParams(seed=seed)
    request = GenerationRequest(f"{identity}-0", request_id, "stub", "gateway-1", [1], 12, sampling)
    made = GenerationRecord(identity, "responses", 1.0, [request], idempotency=key)
    return msgspec.msgpack.encode(GenerationRecords([made]))


def ended(identity: str) -> bytes:
    entry = TokenEntry(f"{identity}-0", 0, 0, [stub_token(7, 0)], finish="length")
    return msgspec.msgpack.encode(TokenFrame("group-1", 1, 1, [entry]))


def batch_job(owner: str, beat: int) -> bytes:
    made = BatchJob("batch_1", "", 0.0, "/v1/completions", "file", "object", "24h", 1.0, owner=owner, beat=beat)
    return msgspec.msgpack.encode(made)


def evidence(*requests: Request, **more: Any) -> Evidence:
    history = History()
    history.requests += requests
    history.poisoned.update(more.pop("poisoned", {}))
    for name in ("batches", "jobs", "keys", "acknowledged", "filled", "quotas", "faults_of_clients"):
        found = more.pop(name, [])
        getattr(history, "faults" if name == "faults_of_clients" else name).extend(found)
    stored = more.pop("stored", [])
    made = Evidence(history, more.pop("now", 4000.0), **more)
    for at, subject, data, *header in stored:
        made.store.wrote(at, subject, header[0] if header else b"", data)
    return made


def broken(given: Evidence) -> list[tuple[str, str]]:
    """Names of the promises, and sentences."""
    watch = Watch(given.history, promises())
    for request in given.history.requests:
        watch.saw(request)
    return [(one.promise, one.told) for one in watch.after(given)]


def lease(holder: str, beat: int = 0) -> bytes:
    return msgspec.msgpack.encode(ModelLease(holder, beat))


def owned(owner: str, *consumers: str) -> bytes:
    return msgspec.msgpack.encode(Ownership(owner, list(consumers)))


def together(until: float) -> Holdings:
    made = Holdings()
    made.look(100.0, {"generation a": frozenset(("gateway-1", "gateway-2")), "b": frozenset(("gateway-1",))})
    made.look(until, {"generation a": frozenset(("gateway-1", "gateway-2"))})
    made.look(until + 5, {"generation a": frozenset(("gateway-2",))})
    return made


FILE = Acknowledged("file", "file-1", 50.0, "", "", "gateway-1:8000", found=200)
GONE = Acknowledged("chat", "chatcmpl-1", 50.0, "", "", "gateway-1:8000", gone_at=60.0, found=404)
REVOKED = KeySeen("0123456789ab", 100.0, "acme", [(104.0, "gateway-1:8000")], [(103.0, "gateway-2:8000")])
LEASES, BATCH = "$KV.leases.models", "$KV.batches.batch_1"
CLAIM = f"$KV.generations.{IDENTITY}"
FULL = (200.0, "a", "429 quota_exceeded: You have 12 files (RYZANSTEIN_TENANT_FILES changes it)")
SOUND = evidence(
    stream(),
    *beside_a_flood(),
    response(stub_text(9, 12)),
    with_logprobs(12),
    keyed(),
    keyed(),
    refused("broker_unavailable"),
    refused("rate_limit_exceeded", 429, kind="limited"),
    refused_later("rate_limit_exceeded", 429),
    refused_later("8", 503),
    refused_later("invalid_api_key", 401, replaced=True),
    refused("ring_lost"),
    filled=[Filled("filling-1", "a", "files", 12, 190.0, made=12, refused=True)],
    quotas=[FULL],
    poisoned={"batch_2": 3},
    batches=[
        batch(),
        struck("fatal_request"),
        batch(ends=("failed",), status="failed", statuses=["failed"], output=[], counts={"completed": 0}),
    ],
    jobs=[job(), job(identity="ftjob-2")],
    keys=[REVOKED],
    acknowledged=[FILE, GONE],
    faults=[
        Fault("kill", "broker-1", 90.0, 95.0),
        Fault("lower_limits", "", 280.0, 290.0, "limits"),
        Fault("new_key", "", 280.0, 299.0, "nothing"),
        *(Fault("rank_crash", "executor-1", at, at) for at in (72.0, 80.0, 90.0, 99.0)),
    ],
    readings=[Reading("gateway-1", "open connections", 0), Reading("gateway-1", "keys", 5, 10, always=True)],
    holdings=together(110.0),
    settings={"model_lease": 20.0},
    stored=[
        (1.0, "records.gateway.1", record(seed=9, key="k")),
        (1.5, "tokens.gateway-1", ended(IDENTITY)),
        (2.0, LEASES, lease("scheduler-1")),
        (7.0, LEASES, lease("scheduler-1", 1)),
        (27.1, LEASES, lease("scheduler-2", 2)),
        (30.0, LEASES, b"", DELETED),
        (30.1, LEASES, lease("scheduler-1", 0)),
        (2.0, BATCH, batch_job("gateway-1", 1)),
        (4.0, BATCH, batch_job("", 2)),
        (4.1, BATCH, batch_job("gateway-2", 3)),
        (13.0, BATCH, batch_job("gateway-1", 4)),
        (3.0, CLAIM, owned("gateway-2", "gateway-1", "gateway-2")),
        (9.0, CLAIM, owned("gateway-3", "gateway-1", "gateway-2", "gateway-3")),
    ],
)


def test_nothing_is_broken_where_nothing_is_wrong() -> None:
    assert broken(SOUND) == []


CASES: list[tuple[str, str, Callable[[], Evidence]]] = [
    ("right_tokens", "got .* at position 3", lambda: evidence(stream(text=stub_text(7, 3) + "!" + stub_text(7, 8)))),
    ("right_tokens", "after 11 of 12 characters", lambda: evidence(stream(text=stub_text(7, 11)))),
    ("right_tokens", "at position 12", lambda: evidence(stream(text=stub_text(7, 12) + "a"))),
    ("right_tokens", "ended with 'stop', not 'length'", lambda: evidence(stream(finish="stop"))),
    (
        "right_tokens",
        "at position 0",
        lambda: evidence(response(stub_text(8, 12)), stored=[(1.0, "records.g.1", record(seed=9))]),
    ),
    (
        "right_tokens",
        "after 5 of 12",
        lambda: evidence(response(stub_text(9, 5)), stored=[(1.0, "records.g.1", record(seed=9))]),
    ),
    ("right_figures", "of 11 tokens for 12", lambda: evidence(with_logprobs(11))),
    ("right_figures", "of -0.5 where", lambda: evidence(with_logprobs(12, -0.5))),
    ("right_figures", "have 13 completion tokens", lambda: evidence(stream(usage={"completion_tokens": 13}))),
    ("right_figures", "without a usage", lambda: evidence(keyed(usage=None))),
    ("every_end", "has no end 3990 s", lambda: evidence(stream(outcome="open", ended=-1.0))),
    ("every_end", "had its end only 190 s", lambda: evidence(stream(ended=200.0))),
    ("every_end", r"batch batch_1 \(completed\) has no end", lambda: evidence(batches=[batch(ended=-1.0)])),
    ("every_end", "job ftjob-1 .* has no end", lambda: evidence(jobs=[job(ended=-1.0)])),
    ("allowed_refusals", "503 broker_unavailable, and nothing", lambda: evidence(refused("broker_unavailable"))),
    (
        "allowed_refusals",
        "internal_error",
        lambda: evidence(refused("internal_error", 500), faults=[Fault("kill", "broker-1", 99, 101)]),
    ),
    (
        "allowed_refusals",
        "nothing was wrong there",
        lambda: evidence(refused("unavailable"), faults=[Fault("kill", "gateway-2", 99, 101)]),
    ),
    (
        "allowed_refusals",
        "fatal_request, and nothing",
        lambda: evidence(refused("fatal_request", 400), faults=[Fault("rank_fault", "executor-1", 99, 101)]),
    ),
    (
        "allowed_refusals",
        "ring_lost, and nothing",
        lambda: evidence(refused("ring_lost"), faults=[Fault("rank_crash", "executor-1", 99, 99)] * 3),
    ),
    ("allowed_refusals", "429", lambda: evidence(refused("queue_full", 429))),
    (
        "allowed_refusals",
        "rate_limit_exceeded, and nothing",
        lambda: evidence(refused("rate_limit_exceeded", 429), faults=[Fault("kill", "gateway-1", 99.0, 101.0)]),
    ),
    (
        "allowed_refusals",
        "unavailable, and nothing",
        lambda: evidence(
            refused("unavailable"),
            faults=[
                Fault("lost_acks", "broker-1", 99.0, 101.0, "nothing"),
                Fault("lower_limits", "", 99.0, 101.0, "limits"),
            ],
        ),
    ),
    ("allowed_refusals", "401 invalid_api_key", lambda: evidence(refused("invalid_api_key", 401))),
    ("allowed_refusals", "the stream ended", lambda: evidence(stream(fault="the stream ended without [DONE]"))),
    (
        "no_surprises",
        "batches-1: /v1/files was",
        lambda: evidence(faults_of_clients=[(5.0, "batches-1: /v1/files was")]),
    ),
    ("one_answer_per_key", "got 2 answers", lambda: evidence(keyed(), keyed(identity=f"chatcmpl-{OTHER}"))),
    ("one_answer_per_key", "different texts", lambda: evidence(keyed(), keyed(text="another"))),
    (
        "one_answer_per_key",
        "2 generations were computed",
        lambda: evidence(
            stored=[
                (1.0, "records.g.1", record(key="k")),
                (1.0, "records.g.1", record(OTHER, key="k")),
                (2.0, "tokens.gateway-1", ended(IDENTITY)),
                (2.0, "tokens.gateway-1", ended(OTHER)),
            ]
        ),
    ),
    (
        "revoked_keys",
        "6.0 s after it had been revoked",
        lambda: evidence(keys=[KeySeen("0123456789ab", 100.0, "acme", [(106.0, "gateway-1:8000")])]),
    ),
    (
        "revoked_keys",
        "71.0 s after it had been revoked",
        lambda: evidence(
            keys=[KeySeen("0123456789ab", 100.0, "acme", [(171.0, "gateway-1:8000")])],
            faults=[Fault("cut", "gateway-1", 99.0, 105.0), Fault("cut", "gateway-2", 99.0, 170.0)],
        ),
    ),
    (
        "revoked_keys",
        "again at 120.0 s",
        lambda: evidence(
            keys=[KeySeen("0123456789ab", 100.0, "", [(120.0, "gateway-1:8000")], [(101.0, "gateway-1:8000")])],
            faults=[Fault("cut", "gateway-1", 99.0, 130.0)],
        ),
    ),
    ("one_result_per_line", "has no result of line-2", lambda: evidence(batches=[batch(output=batch().output[:2])])),
    ("one_result_per_line", "has 2 results of line-0", lambda: evidence(batches=[batch(errors=batch().output[:1])])),
    ("one_result_per_line", "no line of it", lambda: evidence(batches=[batch(wanted={})])),
    ("one_result_per_line", "counts 2", lambda: evidence(batches=[batch(counts={"completed": 2})])),
    ("one_result_per_line", "though nobody wanted", lambda: evidence(batches=[batch(status="cancelled")])),
    ("one_result_per_line", "though nobody wanted", lambda: evidence(batches=[batch(status="expired")])),
    ("one_result_per_line", "though nobody wanted", lambda: evidence(batches=[batch(ends=("failed",))])),
    (
        "one_result_per_line",
        "was completed before",
        lambda: evidence(batches=[batch(statuses=["completed", "in_progress", "completed"])]),
    ),
    (
        "one_result_per_line",
        "for line-1, where",
        lambda: evidence(batches=[batch(wanted={**batch().wanted, "line-1": "other"})]),
    ),
    (
        "lines_computed_once",
        "was 2 generations",
        lambda: evidence(
            batches=[batch()],
            stored=[
                (1.0, "records.g.1", record(request_id="batch_1-4")),
                (1.0, "records.g.1", record(OTHER, request_id="batch_1-4")),
            ],
        ),
    ),
    ("one_result_per_job", "undisturbed abab", lambda: evidence(jobs=[job(), job(identity="b", digest="cd" * 32)])),
    ("one_result_per_job", "0 adapters", lambda: evidence(jobs=[job(names_of_adapters=[])])),
    ("one_result_per_job", "has 2 result files", lambda: evidence(jobs=[job(results=["a", "b"])])),
    ("one_result_per_job", r"steps \[1, 3\]", lambda: evidence(jobs=[job(steps=[1, 3])])),
    ("one_result_per_job", "step 2 2 times", lambda: evidence(jobs=[job(steps=[1, 2, 2, 3])])),
    ("one_result_per_job", "though nobody wanted", lambda: evidence(jobs=[job(status="failed")])),
    (
        "durable",
        "file-1 was acknowledged by gateway-1:8000",
        lambda: evidence(acknowledged=[Acknowledged("file", "file-1", 5.0, "", "", "gateway-1:8000", found=404)]),
    ),
    (
        "durable",
        "was deleted",
        lambda: evidence(
            acknowledged=[Acknowledged("chat", "c", 5.0, "", "", "gateway-1:8000", gone_at=9.0, found=200)]
        ),
    ),
    ("released", "has 2 waiting requests", lambda: evidence(readings=[Reading("s-1", "waiting requests", 2)])),
    ("bounded", "has 11 keys", lambda: evidence(readings=[Reading("g-1", "keys", 11, 10, always=True)])),
    ("one_owner", "gateway-1 and gateway-2 both had generation a", lambda: evidence(holdings=together(120.0))),
    (
        "one_owner",
        "without the log of gateway-2",
        lambda: evidence(
            stored=[
                (3.0, CLAIM, owned("gateway-2", "gateway-1", "gateway-2")),
                (9.0, CLAIM, owned("gateway-3", "gateway-1", "gateway-3")),
            ]
        ),
    ),
    (
        "one_lease_holder",
        "scheduler-2 took the lease of the models .* 19.500 s after",
        lambda: evidence(
            settings={"model_lease": 20.0},
            stored=[(2.0, LEASES, lease("scheduler-1")), (21.5, LEASES, lease("scheduler-2", 1))],
        ),
    ),
    (
        "one_lease_holder",
        "gateway-2 took the lease of batch_1",
        lambda: evidence(stored=[(2.0, BATCH, batch_job("gateway-1", 1)), (9.5, BATCH, batch_job("gateway-2", 2))]),
    ),
    ("others_served", "of b took 30.0 s", lambda: evidence(*beside_a_flood(ended=1040.0))),
    ("fatal_lines", "has ended 4 gateways", lambda: evidence(poisoned={"batch_2": 4})),
    ("fatal_lines", "where line-2 is fatal", lambda: evidence(batches=[struck("internal_error")])),
    ("fatal_lines", "where line-2 is fatal", lambda: evidence(batches=[batch(fatal="line-2")])),
    (
        "quotas_apart",
        "a made 15 files",
        lambda: evidence(filled=[Filled("filling-1", "a", "files", 12, 190.0, made=15)]),
    ),
    ("quotas_apart", "a, which had filled no quota", lambda: evidence(quotas=[FULL])),
    ("quotas_apart", "without the setting's name", lambda: evidence(quotas=[(200.0, "a", "429 quota_exceeded: no")])),
]


@pytest.mark.parametrize(("promise", "told", "made"), CASES, ids=[f"{one}-{told[:24]}" for one, told, _ in CASES])
def test_a_doctored_history_breaks_its_promise(promise: str, told: str, made: Callable[[], Evidence]) -> None:
    found = [sentence for name, sentence in broken(made()) if name == promise]
    assert any(re.search(told, sentence) for sentence in found), (found, broken(made()))


def test_every_promise_has_a_history_that_breaks_it() -> None:
    assert {kind.name for kind in KINDS} == {promise for promise, _, _ in CASES}


def test_what_is_free_at_the_end_is_not_asked_of_a_run_that_did_not_end() -> None:
    given = evidence(readings=[Reading("s-1", "waiting requests", 2)], ended=False)
    assert broken(given) == []


def test_what_is_wrong_is_told_once_and_at_once() -> None:
    history = History()
    watch = Watch(history, promises())
    request = stream(outcome="open", ended=-1.0, text=stub_text(7, 3))
    history.saw(request)
    assert watch.broken == []
    for letter in "!a":
        request.text += letter
        history.saw(request)
    assert [(one.promise, one.subject) for one in watch.broken] == [("right_tokens", request.identity)]
