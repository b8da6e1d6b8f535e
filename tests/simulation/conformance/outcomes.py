"""What came of an operation, as plain values that two servers can agree on: without times, and names that are drawn."""

import re
from collections.abc import Mapping
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.js.errors import APIError

_STREAM_CONFIG = (
    "name", "subjects", "retention", "max_consumers", "max_msgs", "max_bytes", "max_age", "max_msgs_per_subject",
    "max_msg_size", "discard", "storage", "num_replicas", "duplicate_window", "deny_delete", "deny_purge",
    "allow_rollup_hdrs", "allow_direct",
)  # fmt: skip
_STREAM_STATE = (
    "messages", "bytes", "first_seq", "last_seq", "num_subjects", "subjects", "num_deleted", "consumer_count"
)  # fmt: skip
_CONSUMER_CONFIG = (
    "durable_name", "deliver_policy", "opt_start_seq", "ack_policy", "ack_wait", "max_deliver", "filter_subject",
    "replay_policy", "max_waiting", "max_ack_pending", "inactive_threshold", "headers_only", "mem_storage",
    "flow_control", "idle_heartbeat", "num_replicas",
)  # fmt: skip
_CONSUMER_STATE = ("num_ack_pending", "num_redelivered", "num_waiting", "num_pending", "push_bound")
_NO_JSON = "invalid JSON"
_ADDRESS = re.compile(r"127\.0\.0\.1:\d+")
_INBOX = re.compile(r"^_INBOX[A-Za-z_-]*\..*|^_inbox\..*")
_TIME_HEADER = "Nats-Time-Stamp"  # of which only the presence counts


def of_error(error: BaseException) -> dict[str, Any]:
    """Its class, and what of it our code or a user reads."""
    found: dict[str, Any] = {"error": type(error).__name__}
    if isinstance(error, APIError):
        found |= {name: getattr(error, name, None) for name in ("code", "err_code", "description")}
    elif not isinstance(error, TimeoutError | nats.errors.TimeoutError):
        found["text"] = _ADDRESS.sub("<address>", str(error))
    return found


def of_message(message: Msg) -> dict[str, Any]:
    found: dict[str, Any] = {"subject": subject(message.subject), "data": text(message.data)}
    if message.headers:
        found["headers"] = headers(message.headers)
    if message.reply.startswith("$JS.ACK."):
        about = message.metadata
        found |= {
            "stream": about.stream,
            "seq": about.sequence.stream,
            "consumer_seq": about.sequence.consumer,
            "delivered": about.num_delivered,
            "pending": about.num_pending,
        }
    elif message.reply:
        found["reply"] = subject(message.reply)
    return found


def subject(name: str) -> str:
    return "<inbox>" if _INBOX.match(name) else name


def headers(given: Mapping[str, str] | None) -> dict[str, str]:
    return {name: "<time>" if name == _TIME_HEADER else value for name, value in sorted((given or {}).items())}


def text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "backslashreplace")


def answer(given: Any) -> Any:
    """What JetStream's API has answered, in JSON."""
    if isinstance(given, dict):
        if "error" in given:
            return {"error": answer(given["error"])}
        kind = given.get("type", "")
        found = {name: value for name, value in given.items() if name not in _DROPPED}
        if "stream_name" in found and "config" in found:
            return consumer(found) | ({"type": kind} if kind else {})
        if "config" in found and "state" in found:
            return stream(found) | ({"type": kind} if kind else {})
        return {name: answer(value) for name, value in found.items()}
    if isinstance(given, list):
        return [answer(value) for value in given]
    if isinstance(given, str) and given.startswith(_NO_JSON):
        return _NO_JSON  # and what Go says of it
    return given


_DROPPED = ("ts", "created", "time", "cluster", "domain", "api", "reserved_storage", "storage", "limits")


def stream(info: Mapping[str, Any]) -> dict[str, Any]:
    """Of the API's StreamInfo. Missing and zero are the same, as they are in Go; so is where a stream begins that never
    had a message."""
    state = _chosen(info["state"], _STREAM_STATE)
    if "last_seq" not in state:
        state.pop("first_seq", None)
    return {"config": _chosen(info["config"], _STREAM_CONFIG), "state": state}


def consumer(info: Mapping[str, Any]) -> dict[str, Any]:
    """Of the API's ConsumerInfo. How far it is in its stream is left out: nobody reads it, and where nothing is to be
    delivered nats-server moves it on or not."""
    config = _chosen(info["config"], _CONSUMER_CONFIG)
    found = {"stream": info["stream_name"], "config": config, **_chosen(info, _CONSUMER_STATE)}
    if "durable_name" in config:
        found["name"] = info["name"]
    found["delivered"] = (info.get("delivered") or {}).get("consumer_seq", 0)
    return found


def _chosen(given: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := given.get(name))}
