"""JetStream's API: requests on $JS.API.> and their answers.

$JS.API.<STREAM|CONSUMER|DIRECT>.<what>.<stream>[.<consumer>[.<filter>]]
"""

import asyncio
import base64
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from tests.simulation.broker.configs import (
    BAD_REQUEST,
    CONSUMER_NOT_FOUND,
    NO_MESSAGE,
    SECOND,
    STREAM_NOT_FOUND,
    WRONG_NAME,
    ConsumerConfig,
    Refused,
    StreamConfig,
    text_of,
    time_of,
)
from tests.simulation.broker.consumers import Consumer, Pull, status
from tests.simulation.broker.streams import Message, Stream
from tests.simulation.broker.subjects import Filter, overlaps

if TYPE_CHECKING:
    from tests.simulation.broker.jetstream import JetStream

Answer = dict[str, Any]
STREAMS_PAGE, NAMES_PAGE = 256, 1024
_NAME = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def handle(js: "JetStream", tokens: list[str], reply: str, payload: bytes) -> bool:
    """`tokens`: of the subject, behind $JS.API. False: nobody answers that here."""
    if tokens[0] == "DIRECT":
        return direct(js, tokens, reply, payload)
    if tokens[:3] == ["CONSUMER", "MSG", "NEXT"]:
        return _next(js, tokens[3:], reply, payload)
    for words in (3, 2, 1):
        name = ".".join(tokens[:words])
        if name in _HANDLERS:
            answer = _answer(js, name, tokens[words:], payload)
            if reply:
                js.clients.route(reply, "", b"", json.dumps(answer, separators=(",", ":")).encode())
            js.begin()
            return True
    return True


def refusal(subject: str, error: tuple[int, int, str]) -> bytes:
    """The answer to anything on that subject."""
    words = subject.split(".")[2:]
    name = next((name for count in (3, 2, 1) if (name := ".".join(words[:count])) in _HANDLERS), words[0])
    return json.dumps({"type": _kind(name), "error": Refused(*error).as_dict()}).encode()


def _kind(name: str) -> str:
    word = name.lower().replace(".", "_").replace("durable_", "")
    return f"io.nats.jetstream.api.v1.{'account_info' if word == 'info' else word}_response"


def _answer(js: "JetStream", name: str, rest: list[str], payload: bytes) -> Answer:
    told: Answer = {"type": _kind(name)}
    try:
        return told | _HANDLERS[name](js, rest, payload)
    except Refused as error:
        return told | {"error": error.as_dict()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = "unexpected EOF" if "truncated" in str(error) else error  # Go's words, where they are known
        return told | {"error": Refused(400, 10025, f"invalid JSON: {what}").as_dict()}


def _body(payload: bytes) -> Answer:
    return msgspec.json.decode(payload, type=dict[str, Any]) if payload else {}


def _stream(js: "JetStream", name: str) -> Stream:
    stream = js.streams.get(name)
    if stream is None:
        raise Refused(*STREAM_NOT_FOUND)
    return stream


def _consumer(js: "JetStream", rest: list[str]) -> Consumer:
    consumer = _stream(js, rest[0]).watchers.get(rest[1] if len(rest) > 1 else "")
    if not isinstance(consumer, Consumer):
        raise Refused(*CONSUMER_NOT_FOUND)
    return consumer


# --- streams -----------------------------------------------------------------------------------------


def _info(stream: Stream) -> Answer:
    state: Answer = {
        "messages": len(stream.messages),
        "bytes": stream.bytes,
        "first_seq": stream.first_sequence,
        "first_ts": text_of(stream.first_time()),
        "last_seq": stream.last_sequence,
        "last_ts": text_of(stream.last_time),
    }
    if stream.messages:
        state["num_subjects"] = stream.subjects_count()
        gone = stream.last_sequence - stream.first_sequence + 1 - len(stream.messages)
        if gone:
            state["num_deleted"] = gone
    state["consumer_count"] = len(stream.watchers)
    return {
        "config": stream.config.as_dict(),
        "created": text_of(stream.created),
        "state": state,
        "ts": text_of(time.time_ns()),
    }


def _replicas(js: "JetStream", stream: Stream) -> Answer:
    if js.cluster is not None:
        return {"cluster": js.cluster.placement(stream.config.name)}
    return {"cluster": {"leader": js.clients.name}}


def _stream_create(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    config = msgspec.json.decode(payload, type=StreamConfig)
    if config.name != rest[0]:
        raise Refused(*WRONG_NAME)
    _check_replicas(js, config)
    return _info(js.create(config)) | {"did_create": True}


def _check_replicas(js: "JetStream", config: StreamConfig) -> None:
    if js.cluster is not None:
        js.cluster.check(config)
    elif config.num_replicas > 1:
        raise Refused(500, 10074, "replicas > 1 not supported in non-clustered mode")


def _stream_update(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    config = msgspec.json.decode(payload, type=StreamConfig)
    if config.name != rest[0]:
        raise Refused(*WRONG_NAME)
    stream = _stream(js, rest[0])
    _check_replicas(js, config)
    js.update(stream, config)
    return _info(stream)


def _stream_info(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    try:
        stream = _stream(js, rest[0])
    except Refused as error:
        return {"error": error.as_dict(), "total": 0, "offset": 0, "limit": 0}
    told = _info(stream) | _replicas(js, stream)
    wanted = _body(payload).get("subjects_filter")
    if not wanted:
        return {"total": 0, "offset": 0, "limit": 0} | told
    found = stream.subjects(Filter([wanted]))
    told["state"]["subjects"] = found
    return {"total": len(found), "offset": 0, "limit": 100_000} | told


def _matching(js: "JetStream", payload: bytes) -> tuple[list[Stream], int]:
    body = _body(payload)
    wanted = body.get("subject")
    found = [
        stream
        for _, stream in sorted(js.every().items())
        if not wanted or any(overlaps(wanted, taken) for taken in stream.config.subjects or [])
    ]
    return found, int(body.get("offset") or 0)


def _stream_names(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    found, offset = _matching(js, payload)
    names = [stream.config.name for stream in found[offset : offset + NAMES_PAGE]]
    return {"total": len(found), "offset": offset, "limit": NAMES_PAGE, "streams": names or None}


def _stream_list(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    found, offset = _matching(js, payload)
    infos = [_info(stream) for stream in found[offset : offset + STREAMS_PAGE]]
    return {"total": len(found), "offset": offset, "limit": STREAMS_PAGE, "streams": infos}


def _stream_delete(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    js.delete(_stream(js, rest[0]))
    return {"success": True}


def _stream_purge(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    stream, body = _stream(js, rest[0]), _body(payload)
    if stream.config.deny_purge:
        raise Refused(500, 10110, "stream purge not permitted")
    if body.get("seq") and body.get("keep"):
        raise Refused(*BAD_REQUEST)
    wanted = Filter([body["filter"]] if body.get("filter") else [])
    purged = stream.purge(wanted, before=body.get("seq") or 0, keep=body.get("keep") or 0)
    js.changed(stream)
    return {"success": True, "purged": purged}


def _msg_delete(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    stream, number = _stream(js, rest[0]), int(_body(payload).get("seq") or 0)
    if not payload:
        raise Refused(*BAD_REQUEST)
    if stream.config.deny_delete:
        raise Refused(500, 10057, "message delete not permitted")
    if number > stream.last_sequence:
        raise Refused(500, 10057, "stream store EOF")
    if number < stream.first_sequence:
        raise Refused(500, 10057, "no message found")
    if not stream.remove(number):
        raise Refused(400, 10043, f"sequence {number} not found")
    js.changed(stream)
    return {"success": True}


def _wanted(body: Answer) -> Answer:
    """Raises `Refused` where a request for one message asks for none."""
    if not any(body.get(name) for name in ("seq", "last_by_subj", "next_by_subj", "start_time")):
        raise Refused(*BAD_REQUEST)
    return body


def _found(stream: Stream, body: Answer) -> Message | None:
    """What a request for one message asks for."""
    number = int(body.get("seq") or 0)
    if body.get("start_time"):
        number = stream.since(time_of(body["start_time"]))
    if last := body.get("last_by_subj"):
        return stream.messages.get(stream.last_of(last))
    if following := body.get("next_by_subj"):
        return stream.next(max(1, number), Filter([following]))
    return stream.messages.get(number)


def _msg_get(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    body = _wanted(_body(payload))
    message = _found(_stream(js, rest[0]), body)
    if message is None:
        raise Refused(*NO_MESSAGE)
    told: Answer = {"subject": message.subject, "seq": message.sequence, "time": text_of(message.time)}
    if message.header:
        told["hdrs"] = base64.b64encode(message.header).decode()
    if message.data:
        told["data"] = base64.b64encode(message.data).decode()
    return {"message": told}


def direct(js: "JetStream", tokens: list[str], reply: str, payload: bytes) -> bool:
    """One message, from any server that has the stream."""
    stream = js.every().get(tokens[2]) if len(tokens) > 2 and tokens[1] == "GET" else None
    if stream is None or not stream.config.allow_direct:
        return False
    try:
        body = {"last_by_subj": ".".join(tokens[3:])} if len(tokens) > 3 else _body(payload)
        message = _found(stream, _wanted(body))
    except (Refused, msgspec.DecodeError):
        js.clients.route(reply, "", status(408, "Empty Request"), b"")
        return True
    if message is None:
        js.clients.route(reply, "", status(404, "Message Not Found"), b"")
        return True
    about = (
        f"Nats-Stream: {stream.config.name}\r\nNats-Subject: {message.subject}\r\n"
        f"Nats-Sequence: {message.sequence}\r\nNats-Time-Stamp: {text_of(message.time)}\r\n\r\n"
    ).encode()
    head = message.header[:-2] if message.header else b"NATS/1.0\r\n"
    js.clients.route(reply, "", head + about, message.data)
    return True


# --- consumers ---------------------------------------------------------------------------------------


def _about(js: "JetStream", consumer: Consumer) -> Answer:
    delivered: Answer = {"consumer_seq": consumer.delivered, "stream_seq": consumer.next - 1}
    floor: Answer = {"consumer_seq": consumer.floor[0], "stream_seq": consumer.floor[1]}
    for told, at in ((delivered, consumer.active_at), (floor, consumer.acked_at)):
        if at:
            told["last_active"] = text_of(at)
    to = consumer.config.deliver_subject
    return {
        "stream_name": consumer.stream.config.name,
        "name": consumer.name,
        "created": text_of(consumer.created),
        "config": consumer.config.as_dict(),
        "delivered": delivered,
        "ack_floor": floor,
        "num_ack_pending": len(consumer.pending),
        "num_redelivered": len(consumer.redelivered),
        "num_waiting": len(consumer.waiting),
        "num_pending": consumer.left,
        **({"push_bound": True} if to and js.clients.interested(to) else {}),
        "ts": text_of(time.time_ns()),
    }


class _CreateRequest(msgspec.Struct):
    stream_name: str = ""
    config: ConsumerConfig = ConsumerConfig()
    action: str = ""


def _consumer_create(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    request = msgspec.json.decode(payload, type=_CreateRequest)
    if request.stream_name != rest[0]:
        raise Refused(*WRONG_NAME)
    stream, config = _stream(js, rest[0]), request.config
    name = config.name or config.durable_name or (rest[1] if len(rest) > 1 else "")
    if not name:
        name = "".join(js.draw.choice(_NAME) for _ in range(8))
    return _about(js, js.create_consumer(stream, config, name, request.action))


def _consumer_info(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    return _about(js, _consumer(js, rest))


def _consumer_delete(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    js.delete_consumer(_consumer(js, rest))
    return {"success": True}


def _consumer_names(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    names, offset = sorted(_stream(js, rest[0]).watchers), int(_body(payload).get("offset") or 0)
    page = names[offset : offset + NAMES_PAGE]
    return {"total": len(names), "offset": offset, "limit": NAMES_PAGE, "consumers": page}


def _consumer_list(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    found = sorted(js.consumers(_stream(js, rest[0])), key=lambda consumer: consumer.name)
    offset = int(_body(payload).get("offset") or 0)
    infos = [_about(js, consumer) for consumer in found[offset : offset + STREAMS_PAGE]]
    return {"total": len(found), "offset": offset, "limit": STREAMS_PAGE, "consumers": infos}


def _next(js: "JetStream", rest: list[str], reply: str, payload: bytes) -> bool:
    """Somebody pulls."""
    try:
        consumer = _consumer(js, rest)
    except Refused:
        return False
    now = asyncio.get_running_loop().time()
    text = payload.strip()
    try:
        body = {"batch": int(text)} if text.isdigit() else _body(text)
    except msgspec.DecodeError:
        js.clients.route(reply, "", status(400, "Bad Request - invalid JSON"), b"")
        return True
    if consumer.config.deliver_subject:
        js.clients.route(reply, "", status(409, "Consumer is push based"), b"")
        return True
    expires = body.get("expires")
    pull = Pull(
        reply,
        left=body.get("batch") or 1,
        expires=now + expires / SECOND if expires else None,
        no_wait=bool(body.get("no_wait")),
        heartbeat=(body.get("idle_heartbeat") or 0) / SECOND,
    )
    refused = consumer.request(pull, now)
    if refused is not None:
        js.clients.route(reply, "", refused, b"")
    js.run(consumer)
    return True


def _account(js: "JetStream", rest: list[str], payload: bytes) -> Answer:
    unlimited = ("max_memory", "max_storage", "max_streams", "max_consumers", "max_ack_pending")
    return {
        "memory": 0,
        "storage": js.used(),
        "reserved_memory": 0,
        "reserved_storage": js.reserved(),
        "streams": len(js.every()),
        "consumers": sum(len(stream.watchers) for stream in js.every().values()),
        "limits": {
            **dict.fromkeys((*unlimited, "memory_max_stream_bytes", "storage_max_stream_bytes"), -1),
            "max_bytes_required": False,
        },
        "api": {"level": 5, "total": 0, "errors": 0},
    }


_HANDLERS: dict[str, Callable[["JetStream", list[str], bytes], Answer]] = {
    "INFO": _account,
    "STREAM.CREATE": _stream_create,
    "STREAM.UPDATE": _stream_update,
    "STREAM.INFO": _stream_info,
    "STREAM.NAMES": _stream_names,
    "STREAM.LIST": _stream_list,
    "STREAM.DELETE": _stream_delete,
    "STREAM.PURGE": _stream_purge,
    "STREAM.MSG.DELETE": _msg_delete,
    "STREAM.MSG.GET": _msg_get,
    "CONSUMER.CREATE": _consumer_create,
    "CONSUMER.DURABLE.CREATE": _consumer_create,
    "CONSUMER.INFO": _consumer_info,
    "CONSUMER.NAMES": _consumer_names,
    "CONSUMER.LIST": _consumer_list,
    "CONSUMER.DELETE": _consumer_delete,
}
