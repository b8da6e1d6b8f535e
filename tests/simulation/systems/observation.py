"""Which states things go through, taken from what services write.

gateways        Generation.state, as it is set                    request
the broker      entries of the buckets, as they are stored        batch, job, group, model (on each host)
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from services.gateway.lifecycle.generation import Generation
from shared.messages import GroupRecord
from shared.messages.batches import BatchJob
from shared.messages.registry import HostRecord
from shared.messages.training import TrainingJob
from shared.nats import subjects
from tests.simulation.broker.jetstream import JetStream
from tests.simulation.broker.streams import Stream
from tests.simulation.core.processes import CURRENT
from tests.simulation.systems.transitions import Transitions

_PREFIX = "$KV."
_STATE = Generation.state  # the slot itself, of whatever replaces it


class Records:
    """What is stored in buckets."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._models: dict[str, set[str]] = {}  # by host: those of which it has said something
        self._readers: Mapping[str, tuple[msgspec.msgpack.Decoder[Any], Callable[[str, Any], None]]] = {
            subjects.BATCHES_BUCKET: (msgspec.msgpack.Decoder(BatchJob), self._batch),
            subjects.TRAINING_BUCKET: (msgspec.msgpack.Decoder(TrainingJob), self._job),
            subjects.GROUPS_BUCKET: (msgspec.msgpack.Decoder(GroupRecord), self._group),
            subjects.HOSTS_BUCKET: (msgspec.msgpack.Decoder(HostRecord), self._host),
        }

    def stored(self, subject: str, payload: bytes) -> None:
        """A message that a stream has taken."""
        if not subject.startswith(_PREFIX) or not payload:
            return
        bucket, _, key = subject[len(_PREFIX) :].partition(".")
        reader = self._readers.get(bucket)
        if reader is None:
            return
        decoder, note = reader
        try:
            note(key, decoder.decode(payload))
        except msgspec.MsgspecError:
            return  # not such a record: an index beside them

    def _batch(self, key: str, job: BatchJob) -> None:
        self._transitions.moved("batch", job.id, job.status)

    def _job(self, key: str, job: TrainingJob) -> None:
        self._transitions.moved("job", job.id, job.status)

    def _group(self, key: str, record: GroupRecord) -> None:
        self._transitions.moved("group", key, record.state)

    def _host(self, key: str, record: HostRecord) -> None:
        said = {model.model: model.state for model in record.host.models}
        for model, state in said.items():
            self._transitions.moved("model", f"{key} {model}", state)
        for model in self._models.get(key, set()) - said.keys():
            self._transitions.gone("model", f"{key} {model}")
        self._models[key] = set(said)


def watch_store(told: Callable[[str, bytes, bytes], None]) -> None:
    """From now on, in this process: `told` is given subject, header and payload of what a broker's stream takes."""
    store = JetStream.store_message

    def store_and_tell(
        self: JetStream, stream: Stream, subject: str, reply: str, header: bytes, payload: bytes
    ) -> None:
        before = stream.last_sequence
        store(self, stream, subject, reply, header, payload)
        if stream.last_sequence != before:
            told(subject, header, payload)

    JetStream.store_message = store_and_tell  # type: ignore[method-assign]


def watch_generations(transitions: Transitions) -> None:
    """From now on, in this process."""

    def set_state(generation: Generation, state: str) -> None:
        subject = f"{CURRENT.get().name} {generation.request.generation_id}"
        if state == "received":  # it is made, perhaps not for the first time
            transitions.gone("request", subject)
        transitions.moved("request", subject, state)
        _STATE.__set__(generation, state)  # type: ignore[attr-defined]  # a slot

    Generation.state = property(_STATE.__get__, set_state)  # type: ignore[assignment,attr-defined]
