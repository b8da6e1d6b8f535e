"""Scripts that are drawn: what nobody would write down. Hypothesis reduces one that differs to its shortest form.

Nothing in them depends on times: what is published is waited for before the next step, and pulls take what there is.
"""

from typing import Any

from hypothesis import strategies as st

from tests.simulation.conformance.operations import Script, Step, do

LONGEST = 40  # steps of a script, without those that begin and end it
_NUMBERS = st.integers(1, 8)
_SUBJECTS = st.sampled_from(("s.a", "s.b", "s.c.d"))
_FILTERS = st.sampled_from(("s.a", "s.b", "s.*", "s.>", "s.c.d", ">", "t"))
_KEYS = st.sampled_from(("x", "y", "y.z"))
_ACKS = st.sampled_from(("+ACK", "+ACK", "-NAK", "+WPI", "+TERM"))
_OF_S, _OF_B = {"stream": "S"}, {"bucket": "B"}


def _step(name: str, of: dict[str, Any], /, **drawn: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.fixed_dictionaries(drawn).map(lambda args: do(name, **of, **args))


# --- messages without a store -------------------------------------------------------------------------

_PATTERNS = st.sampled_from(("a", "a.b", "a.*", "*.b", "*", ">", "a.>", "a.*.c", "*.*", "a.b.c"))
_TOPICS = st.sampled_from(("a", "b", "a.b", "c.b", "a.b.c", "a.x.c", "a.b.c.d"))
_NAMES = st.sampled_from(("one", "two", "three"))


@st.composite
def messages(draw: st.DrawFn) -> Script:
    """Subscriptions by patterns, some for so many messages, on two connections."""
    steps: list[Step] = []
    boxes: dict[str, str] = {}  # subscriptions by name, and whose they are
    for _ in range(draw(st.integers(1, LONGEST))):
        kind = draw(st.sampled_from(("publish", "publish", "subscribe", "unsubscribe", "received")))
        if kind == "publish":
            steps.append(do("publish", draw(st.sampled_from("ab")), subject=draw(_TOPICS), data=str(len(steps))))
        elif kind == "subscribe":
            name, by = f"{draw(_NAMES)}{len(boxes)}", draw(st.sampled_from("ab"))
            boxes[name] = by
            steps.append(do("subscribe", by, name=name, subject=draw(_PATTERNS), most=draw(st.integers(0, 3))))
        elif kind == "unsubscribe" and boxes:
            name = draw(st.sampled_from(sorted(boxes)))
            steps.append(do("unsubscribe", boxes[name], name=name))
        elif boxes:
            name = draw(st.sampled_from(sorted(boxes)))
            steps.append(do("all_received", boxes[name], names=[name]))
    ends = [do("all_received", by, names=[name]) for name, by in boxes.items()]
    return Script("drawn messages", "shared.nats.bus", (*steps, *ends))


# --- streams and their consumers ----------------------------------------------------------------------

_LIMITS = st.fixed_dictionaries(
    {"allow_direct": st.booleans(), "allow_rollup_hdrs": st.booleans()},
    optional={
        "max_msgs": st.integers(1, 6),
        "max_msgs_per_subject": st.integers(1, 3),
        "max_bytes": st.sampled_from((100, 200, 400)),
        "discard": st.sampled_from(("old", "new")),
        "retention": st.sampled_from(("limits", "workqueue")),
        "deny_delete": st.booleans(),
    },
)
_HEADERS = st.one_of(
    st.none(),
    st.none(),
    st.fixed_dictionaries({"Nats-Msg-Id": st.sampled_from("12")}),
    st.fixed_dictionaries({"Nats-Expected-Last-Sequence": _NUMBERS.map(str)}),
    st.fixed_dictionaries({"Nats-Expected-Last-Subject-Sequence": st.integers(0, 8).map(str)}),
    st.fixed_dictionaries({"Nats-Rollup": st.sampled_from(("sub", "all"))}),
)
_STORED = _step("stored", {}, subject=_SUBJECTS, data=st.sampled_from(("", "x", "y" * 30)), headers=_HEADERS)
_READ = st.one_of(
    _step("get", _OF_S, seq=_NUMBERS, direct=st.booleans()),
    _step("get", _OF_S, subject=_FILTERS, direct=st.booleans()),
    _step("get", _OF_S | {"next": True}, seq=_NUMBERS, subject=_FILTERS, direct=st.booleans()),
    _step("stream_info", {"name": "S"}, subjects=_FILTERS),
)
_REMOVED = st.one_of(
    _step("delete_message", _OF_S, seq=_NUMBERS),
    _step("purge_stream", _OF_S, subject=_FILTERS),
    _step("purge_stream", _OF_S, subject=_FILTERS, seq=_NUMBERS),
    _step("purge_stream", _OF_S, subject=_FILTERS, keep=_NUMBERS),
    _step("purge_stream", _OF_S, keep=_NUMBERS),
    _step("purge_stream", _OF_S, seq=_NUMBERS),
)
_CONSUMERS = st.sampled_from(("one", "two"))
_CONSUMER = st.fixed_dictionaries(
    {"ack_policy": st.sampled_from(("explicit", "explicit", "none", "all")), "filter_subject": _FILTERS},
    optional={
        "deliver_policy": st.sampled_from(("all", "new", "last_per_subject")),
        "max_deliver": st.integers(1, 3),
        "max_ack_pending": st.integers(1, 2),
        "headers_only": st.just(True),
    },
)
_PULLED = _step("pull_now", _OF_S, consumer=_CONSUMERS, batch=st.integers(1, 3))
_CONSUMED = st.one_of(
    st.builds(lambda name, config: do("add_consumer", stream="S", durable_name=name, **config), _CONSUMERS, _CONSUMER),
    _PULLED,
    _PULLED,
    _step("acknowledge", {}, place=st.integers(0, 9), kind=_ACKS),
    _step("consumer_info", _OF_S, consumer=_CONSUMERS),
    _step("delete_consumer", _OF_S, consumer=_CONSUMERS),
)  # fmt: skip


def streams() -> st.SearchStrategy[Script]:
    """A stream `S` of `s.>` with limits, and two durable consumers that pull."""
    steps = st.lists(st.one_of(_STORED, _STORED, _READ, _REMOVED, _CONSUMED, _CONSUMED), max_size=LONGEST)
    ends = (
        do("stream_info", name="S", subjects=">"),
        do("consumer_info", stream="S", consumer="one"),
        do("consumer_info", stream="S", consumer="two"),
    )
    return st.builds(
        lambda limits, steps: Script(
            "a drawn stream",
            "shared.nats.streams",
            (do("add_stream", name="S", subjects=["s.>"], **limits), *steps, *ends),
        ),
        _LIMITS,
        steps,
    )


# --- buckets -------------------------------------------------------------------------------------------

_VALUES = st.sampled_from(("", "1", "two"))
# What a watcher shows of one write is waited for: of two that follow at once it may leave out the first.
_WRITTEN = st.one_of(
    _step("kv_put", _OF_B, key=_KEYS, value=_VALUES),
    _step("kv_create", _OF_B, key=_KEYS, value=_VALUES),
    _step("kv_update", _OF_B, key=_KEYS, value=_VALUES, last=st.integers(0, 8)),
    _step("kv_delete", _OF_B, key=_KEYS, last=st.one_of(st.none(), st.integers(0, 8))),
    _step("kv_purge", _OF_B, key=_KEYS),
).map(lambda step: (step, do("kv_caught_up", name="w", bucket="B")))
_SEEN = st.one_of(
    _step("kv_get", _OF_B, key=_KEYS, revision=st.one_of(st.none(), _NUMBERS)),
    st.just(do("kv_keys", bucket="B")),
    _step("kv_history", _OF_B, key=_KEYS),
    st.just(do("kv_status", bucket="B")),
    st.just(do("stream_info", name="KV_B", subjects=">")),
).map(lambda step: (step,))


@st.composite
def buckets(draw: st.DrawFn) -> Script:
    """A bucket `B`, watched from some moment on."""
    before = draw(st.lists(_SEEN, max_size=1)) + [(steps[0],) for steps in draw(st.lists(_WRITTEN, max_size=6))]
    after = draw(st.lists(st.one_of(_WRITTEN, _WRITTEN, _SEEN), max_size=LONGEST // 2))
    watched = (do("kv_watch", name="w", bucket="B"), do("kv_caught_up", name="w", bucket="B"))
    return Script(
        "a drawn bucket",
        "shared.nats.kv",
        (
            do("create_kv", bucket="B", history=draw(st.integers(1, 3))),
            *(step for steps in before for step in steps),
            *watched,
            *(step for steps in after for step in steps),
            do("kv_caught_up", name="w", bucket="B"),
        ),
    )


FAMILIES = {"messages": messages, "streams": streams, "buckets": buckets}
