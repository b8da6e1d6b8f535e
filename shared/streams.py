"""Streams as they must be: created, or brought up to date, also while a cluster has no leader yet."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from nats.js.api import StreamConfig
from nats.js.errors import APIError, BadRequestError, NotFoundError

from shared.broker_errors import (
    BROKER_ERRORS,
    broker_error,
    exists_otherwise,
    lacks_jetstream,
    lacks_leader,
    lacks_room,
    lacks_servers,
)
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from shared.bus import Bus

T = TypeVar("T")

LEADER_PAUSE = 0.1
"""Seconds between two questions to a cluster that has no leader."""


async def ensure_stream(bus: "Bus", config: StreamConfig, *, change: bool = True) -> None:
    """Creates the stream, or gives it these limits if `change` says so. Raises `BrokerUnavailable`,
    `ConfigurationError`."""
    try:
        await when_led(bus, lambda: _add_or_update(bus, config, change))
    except BROKER_ERRORS as error:
        if lacks_jetstream(error):
            raise ConfigurationError(
                f"NATS at {bus.where} runs without JetStream; start nats-server with -js -sd DIRECTORY. "
                "(Its log says why, if JetStream was switched off: a full disk does that.)"
            ) from None
        raise broker_error(f"create the stream {config.name}", error) from None


async def when_led(bus: "Bus", work: Callable[[], Awaitable[T]]) -> T:
    """Does `work` again while the cluster has no leader, for as long as one waits for a broker that starts."""
    give_up = asyncio.get_running_loop().time() + bus.patience
    while True:
        try:
            return await work()
        except BROKER_ERRORS as error:
            waits = bus.clustered and (lacks_leader(error) or isinstance(error, TimeoutError))
            if not waits or asyncio.get_running_loop().time() >= give_up:
                raise
        await asyncio.sleep(LEADER_PAUSE)


async def _add_or_update(bus: "Bus", config: StreamConfig, change: bool) -> None:
    jetstream = bus.jetstream()
    refusal: APIError | None = None
    for replicas in bus.replica_choices():
        config.num_replicas = replicas
        try:
            await jetstream.add_stream(config)
            return
        except APIError as error:
            refusal = error
            if lacks_servers(error):
                continue
            if not isinstance(error, BadRequestError):
                raise
            if replicas < bus.replicas or (not change and exists_otherwise(error)):
                return  # it exists, and is kept by more servers than are up; or is for others to change
            break  # it exists with other limits: ours are the newer ones
    assert refusal is not None, "the loop ends with an answer"
    if lacks_servers(refusal):
        raise ConfigurationError(
            f"NATS at {bus.where} cannot keep {config.num_replicas} replicas ({refusal.description}); set "
            "RYZANSTEIN_NATS_REPLICAS to the number of its servers, or less."
        )
    try:
        await jetstream.update_stream(config)
    except NotFoundError:  # it does not exist, so the first answer says what is wrong
        raise _other_stream(bus, config, refusal) from None
    except APIError as error:
        if error.code == 503 or lacks_room(error):
            raise
        raise _other_stream(bus, config, error) from None


def _other_stream(bus: "Bus", config: StreamConfig, error: APIError) -> ConfigurationError:
    return ConfigurationError(
        f"NATS at {bus.where} cannot have the stream {config.name} as it must be "
        f"({error.description}); delete the stream that is in its way, or use another server."
    )
