"""`ryzanstein keys`: API keys, made and revoked in the KV bucket that all gateways watch."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer

from services.cli.target import AsJson, DataDir, NatsUrl, nats_of_stack
from services.cli.ui import console, print_columns, print_json, say
from shared.config import CommonSettings, seconds_of
from shared.errors import ConfigurationError
from shared.keys import KeyLimits, KeyRecord, NewKey, new_key, parse
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket, KvEntry
from shared.nats.streams import info_of, messages_in

T = TypeVar("T")

DEFAULT_TENANT = "default"
HEADINGS = [
    "id",
    "tenant",
    "name",
    "state",
    "created",
    "expires",
    "requests/min",
    "tokens/min",
    "concurrent",
    "models",
    "keys",
]

keys_app = typer.Typer(
    help="API keys. Once one exists, gateways require a key.", no_args_is_help=True, rich_markup_mode=None
)

Identity = Annotated[str, typer.Argument(metavar="ID", help="The key's id: the part between rz- and the next -.")]


class KeyStatus(msgspec.Struct, frozen=True):
    """A key as `--json` shows it; scripts rely on it. Times are unix seconds, 0: none."""

    id: str
    name: str
    tenant: str
    state: str  # active, expired or revoked
    created: float
    expires: float
    revoked: float
    limits: KeyLimits
    manage_models: bool
    view_keys: bool


@keys_app.command()
def create(
    what_for: Annotated[str, typer.Argument(help="What it is for, as --name.", metavar="[NAME]")] = "",
    tenant: Annotated[str, typer.Option(help="Tenant that owns the key; tenants are isolated from each other.")] = (
        DEFAULT_TENANT
    ),
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    requests_per_minute: Annotated[int, typer.Option(help="0: the gateways' default.", min=0)] = 0,
    tokens_per_minute: Annotated[int, typer.Option(help="0: the gateways' default.", min=0)] = 0,
    concurrent: Annotated[int, typer.Option(help="Concurrent generations. 0: the gateways' default.", min=0)] = 0,
    expires: Annotated[
        str, typer.Option(help="After 90s, 30m, 12h, 30d or 4w, or on a date (ISO 8601).", metavar="WHEN")
    ] = "",
    manage_models: Annotated[
        bool, typer.Option("--manage-models", help="Allow it to register, load, unload and remove models over the API.")
    ] = False,
    view_keys: Annotated[
        bool, typer.Option("--view-keys", help="Allow it to list all keys and their use over the API, never a secret.")
    ] = False,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Create a key and print it, once: only its hash is stored."""
    if what_for and name and what_for != name:
        raise ConfigurationError(f"The key has two names, {what_for!r} and --name {name!r}; give one.")
    if not 1 <= len(tenant) <= 64 or not tenant.isprintable():
        raise ConfigurationError("--tenant must have 1 to 64 printable characters.")
    now = time.time()
    key = new_key(
        tenant,
        now,
        name=name or what_for,
        expires=when(expires, now),
        limits=KeyLimits(requests_per_minute, tokens_per_minute, concurrent),
        manage_models=manage_models,
        view_keys=view_keys,
    )
    _with_bucket(data_dir, nats_url, lambda bucket: _store(bucket, key))
    print(key.token)  # noqa: T201  # alone on standard output: scripts take it from there
    print(f"Key {key.identity} of tenant {tenant}. It is not shown again: store it now.", file=sys.stderr)  # noqa: T201


@keys_app.command("list")
def list_keys(json: AsJson = False, data_dir: DataDir = None, nats_url: NatsUrl = "") -> None:
    """Show all keys, without their secrets."""
    keys = _all(data_dir, nats_url)
    if json:
        print_json(keys)
        return
    print_columns(console(), [HEADINGS, *map(_row, keys)], right=(6, 7, 8))


@keys_app.command()
def show(identity: Identity, json: AsJson = False, data_dir: DataDir = None, nats_url: NatsUrl = "") -> None:
    """Show one key, without its secret."""
    identity = _identity(identity)
    found = [key for key in _all(data_dir, nats_url) if key.id == identity]
    if not found:
        raise _unknown(identity)
    if json:
        print_json(found[0])
        return
    key = found[0]
    rows = list(zip(HEADINGS[1:], _row(key)[1:], strict=True))
    rows.insert(5, ("revoked", _date(key.revoked)))
    print_columns(console(), [("key", f"rz-{key.id}-***"), *rows])


@keys_app.command()
def revoke(identity: Identity, data_dir: DataDir = None, nats_url: NatsUrl = "") -> None:
    """Have a key refused from now on, by every gateway; what it has begun may end."""
    identity = _identity(identity)
    _with_bucket(data_dir, nats_url, lambda bucket: _revoke(bucket, identity))
    say(console(), f"{identity} is revoked.")


# --- inside --------------------------------------------------------------------------------------


def when(text: str, now: float) -> float:
    """Unix seconds for `30d` and the like, or a date; 0 for nothing. Raises `ConfigurationError`."""
    if not text:
        return 0.0
    if seconds := seconds_of(text):
        return now + seconds
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            f"--expires cannot be {text!r}; write 90s, 30m, 12h, 30d or 4w, or a date such as 2027-01-31."
        ) from None
    moment = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if moment <= now:
        raise ConfigurationError(f"--expires {text} is in the past; name a time in the future.")
    return moment


def _identity(given: str) -> str:
    """The id in what somebody typed: an id, or a whole key."""
    whole = parse(given)
    return whole[0] if whole else given.removeprefix("rz-")


def _unknown(identity: str) -> ConfigurationError:
    return ConfigurationError(f"There is no key {identity!r}; `ryzanstein keys list` shows them.")


def _with_bucket(data_dir: Path | None, nats_url: str, work: Callable[[Bucket[KeyRecord]], Awaitable[T]]) -> T:
    settings: CommonSettings = nats_of_stack(data_dir, nats_url)

    async def run() -> T:
        async with Bus.session(settings, "ryzanstein keys") as bus:
            return await work(await open_keys(bus))

    return asyncio.run(run())


async def open_keys(bus: Bus) -> Bucket[KeyRecord]:
    """The bucket of keys. An empty one gets those of an older release; from then on gateways read the others no more,
    and neither does this, but for what an interrupted copy left there: older than this bucket, and never in it."""
    bucket = await Bucket.open(bus, subjects.KEYS_BUCKET, KeyRecord)
    if await messages_in(bus, f"KV_{subjects.OLD_KEYS_BUCKET}"):
        made = await info_of(bus, f"KV_{subjects.KEYS_BUCKET}")
        assert made is not None, "it is open"
        before = made.created if made.state.messages else None
        older = await Bucket.open(bus, subjects.OLD_KEYS_BUCKET, KeyRecord)
        copied = await bucket.items()
        for identity, record in (await older.items(before)).items():
            if identity not in copied:
                await bucket.update(identity, record, 0)  # `create` would bring back a deleted one
    return bucket


async def _store(bucket: Bucket[KeyRecord], key: NewKey) -> None:
    if await bucket.create(key.identity, key.record) is None:  # 48 random bits met twice
        raise ConfigurationError("A key of that id exists already; try again.")


async def _revoke(bucket: Bucket[KeyRecord], identity: str) -> None:
    def made(known: KvEntry[KeyRecord] | None) -> KeyRecord:
        if known is None:
            raise _unknown(identity)
        return msgspec.structs.replace(known.value, revoked=known.value.revoked or time.time())

    await bucket.change(identity, made)


def _all(data_dir: Path | None, nats_url: str) -> list[KeyStatus]:
    records = _with_bucket(data_dir, nats_url, lambda bucket: bucket.items())
    now = time.time()
    return [
        msgspec.convert({**msgspec.structs.asdict(record), "id": identity, "state": record.state(now)}, KeyStatus)
        for identity, record in sorted(records.items(), key=lambda item: item[1].created)
    ]


def _row(key: KeyStatus) -> list[str]:
    limits = (key.limits.requests_per_minute, key.limits.tokens_per_minute, key.limits.concurrent)
    times = (_date(key.created), _date(key.expires))
    return [
        key.id,
        key.tenant,
        key.name or "-",
        key.state,
        *times,
        *(str(limit or "-") for limit in limits),
        "manage" if key.manage_models else "-",
        "view" if key.view_keys else "-",
    ]


def _date(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M") if moment else "-"


def add_to(app: typer.Typer) -> None:
    app.add_typer(keys_app, name="keys")
