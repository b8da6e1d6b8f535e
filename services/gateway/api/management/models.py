"""What may be done to models over HTTP: the rules, and the writes to the registry. The scheduler that decides acts.

load, unload ──▶ action of the entry ──▶ placement ──▶ hosts
pull, delete of files ──▶ hosts.<instance>.control
"""

import asyncio
import posixpath
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import structlog

from services.gateway.core.catalog import Catalog
from services.gateway.core.errors import FieldProblem, InvalidParameter, RouteError
from services.gateway.core.registry import not_registered
from services.gateway.core.settings import GatewaySettings
from shared.errors import (
    BrokerUnavailable,
    ModelDoesNotFit,
    NoGroupAvailable,
    RyzansteinError,
    Unavailable,
    error_from_code,
)
from shared.messages import HostCommand, HostReply, ModelSpec, PullModel, RemoveModel
from shared.model_store.catalog import BUILT_IN
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.pins import promises_more
from shared.registry import MAX_IDLE, Problem, of_hub, problems_of, read_partly

log = structlog.get_logger(__name__)

# Seconds in which the scheduler that decides may say that a model has no place, before the load counts as begun.
REFUSAL_TIMEOUT = 2.0
COMMAND_TIMEOUT = 5.0  # seconds for a host's answer
COMMANDS_AT_ONCE = 16
_HUB_NAME = re.compile(r"(hf://)?[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?", re.ASCII)
_BETWEEN_DIRECTORIES = re.compile(r",|:(?=/)")  # a colon as in PATH too; one within a name is no end of it


class Management:
    """One per gateway. Methods raise `RouteError`, `InvalidParameter`, `UnknownModel`, `BrokerUnavailable`."""

    def __init__(self, bus: Bus, catalog: Catalog, settings: GatewaySettings) -> None:
        self._bus = bus
        self._catalog = catalog
        self._registry = catalog.registry
        given = [one.strip() for one in _BETWEEN_DIRECTORIES.split(settings.model_directories) if one.strip()]
        cache = str(settings.model_cache.expanduser())
        self._directories = [posixpath.normpath(one) for one in (*given, cache)]

    # --- entries ---------------------------------------------------------------------------------

    async def put(self, name: str, fields: Any, revision: int | None) -> tuple[ModelSpec, int]:
        """Writes the entry that `fields` declare; returns it and its revision. `revision`: see `ModelRegistry.put`."""
        fields = _object(fields)
        if fields.setdefault("name", name) != name:
            raise InvalidParameter(
                f"The path names the model {name[:128]!r} and the body another; name one.", param="name"
            )
        declared, found = read_partly(fields)

        def entry(known: ModelSpec | None) -> ModelSpec:
            self._check(declared, found, known)
            assert declared is not None, "it has a name"
            self._check_pins(declared, known)
            made = msgspec.structs.replace(declared, created=int(time.time()))
            if known is None:
                return made
            kept = {name: getattr(known, name) for name in ("action", "action_at", "force", "defaults")}
            if not _other_files(known, declared):
                kept["created"] = known.created
            return msgspec.structs.replace(made, **kept)

        spec, given, new = await self._registry.put(name, entry, revision=revision)
        log.info("model_registered" if new else "model_changed", model=name, source=spec.source)
        return spec, given

    async def patch(self, name: str, fields: Any, revision: int | None) -> tuple[ModelSpec, int]:
        """Changes the fields that are given."""
        changes = _object(fields)
        if changes.get("name", name) != name:
            raise InvalidParameter(
                "A model cannot be renamed; give it an alias, or add it under another name.", param="name"
            )

        def change(known: ModelSpec) -> ModelSpec:
            spec, found = read_partly(changes, base=known)
            self._check(spec, found, known)
            assert spec is not None, "there is a base"
            self._check_pins(spec, known)
            if _other_files(known, spec):
                spec = msgspec.structs.replace(spec, created=int(time.time()))
            return spec

        spec, given = await self._registry.change(name, change, revision=revision)
        log.info("model_changed", model=name, fields=sorted(changes))
        return spec, given

    async def delete(self, name: str, revision: int | None = None, *, files: bool = False) -> str:
        """Removes an entry, and with `files` what hosts have on disk of it and no other entry names, once nothing runs
        with it any more. Returns its own name."""
        spec = self._spec(name)
        if spec.pinned:
            raise _conflict(f"The model '{spec.name}' is pinned; unpin it before it is removed.", "model_pinned")
        files = files and not self._shares_files(spec)
        held = list(self._registry.hosts_say(spec.name)) if files else []
        removed = await self._registry.delete(spec.name, revision=revision)
        log.info("model_removed", model=spec.name, files=files)
        if held:
            done = f"The model '{spec.name}' was removed, but some of its files remain: "
            await self._command(held, RemoveModel(removed), done)
        return spec.name

    def _shares_files(self, spec: ModelSpec) -> bool:
        others = (other for other in self._registry.specs.values() if other.name != spec.name)
        return any((other.source, other.revision) == (spec.source, spec.revision) for other in others)

    # --- actions ---------------------------------------------------------------------------------

    async def load(self, name: str) -> None:
        """Has a model loaded, if it is not. Raises `ModelDoesNotFit` where no host can take it."""
        model = self._catalog.resolve(name).model
        if self._catalog.status(model).ready:
            return
        before = self._spec(model)
        asked = await self._registry.ask(model, "load")
        if error := await self._refusal(model):
            back = {"action": before.action, "action_at": before.action_at, "force": before.force}
            await self._registry.change(
                model, lambda known: msgspec.structs.replace(known, **back) if known == asked else known
            )
            raise error
        log.info("model_load_asked", model=model)

    async def unload(self, name: str, *, force: bool) -> None:
        """Has a model unloaded; with `force` what runs ends with an error, else it is waited for."""
        model = self._catalog.resolve(name).model
        spec = self._registry.specs.get(model)
        if spec is None:
            raise _conflict(
                f"The model '{model[:128]}' is served by an executor that was started with it; stop that executor.",
                "model_not_managed",
            )
        if spec.pinned:
            raise _conflict(f"The model '{model}' is pinned; unpin it before it is unloaded.", "model_pinned")
        await self._registry.ask(model, "unload", force=force)
        log.info("model_unload_asked", model=model, force=force)

    async def keep(self, model: str, seconds: float) -> None:
        """Has a model stay as a request wants it: pinned below 0, else unloaded after so many idle seconds (0: as its
        entry says), without the pin of an earlier request. Raises `ModelDoesNotFit` as `patch`."""

        def change(known: ModelSpec) -> ModelSpec:
            if seconds < 0 and not known.pinned:
                # An earlier unload, after which requests have loaded it again, is not repeated.
                action = "" if known.action == "unload" else known.action
                spec = msgspec.structs.replace(known, pinned=True, pinned_by_request=True, action=action)
                self._check_pins(spec, known)
                return spec
            if seconds < 0:
                return known
            idle = min(seconds, MAX_IDLE) or known.idle
            return msgspec.structs.replace(
                known, pinned=known.pinned and not known.pinned_by_request, pinned_by_request=False, idle=idle
            )

        known = self._spec(model)
        if change(known) != known:
            await self._registry.change(model, change)
            log.info("model_changed", model=model, fields=["idle", "pinned"])

    async def pull(self, name: str, hosts: int) -> None:
        """Has the files of a model fetched by so many hosts; one that is not registered is, under that name."""
        ready = self._registry.ready_hosts()
        if not ready:
            raise _conflict(
                "No host takes models now: start an executor without a model, or with RYZANSTEIN_TAKES_MODELS=true.",
                "no_host_takes_models",
            )
        model = self._registry.model_of(name)
        spec = self._registry.specs.get(model)
        if spec is None:
            spec, _ = await self.put(name, {"name": name, "source": name}, 0)
        held = self._registry.hosts_say(spec.name)
        wanted = sorted(ready, key=lambda one: one not in held)[:hosts]
        await self._command(wanted, PullModel(spec))
        log.info("model_pull_asked", model=spec.name, hosts=wanted)

    # --- rules -----------------------------------------------------------------------------------

    def _spec(self, name: str) -> ModelSpec:
        model = self._registry.model_of(name)
        spec = self._registry.specs.get(model)
        if spec is None:
            raise not_registered(name)
        return spec

    def _check(self, spec: ModelSpec | None, found: Iterable[Problem], known: ModelSpec | None) -> None:
        """Raises `InvalidParameter` with everything that is wrong."""
        problems = list(found)
        if spec is not None:
            others = [other for other in self._registry.specs.values() if other.name != spec.name]
            problems += problems_of(spec, others, self._catalog.adapters.records)
            if (known is None or known.source != spec.source) and (wrong := self.wrong_source(spec.source)):
                problems.append(Problem("source", wrong))
            draft = spec.settings.draft_model
            known_draft = known.settings.draft_model if known is not None else None
            if draft and draft != known_draft and (wrong := self.wrong_source(draft)):
                problems.append(Problem("settings.draft_model", wrong))
        if problems:
            raise InvalidParameter(
                " ".join(one.text for one in problems),
                param=problems[0].field or None,
                reason="invalid_model",
                problems=[FieldProblem(one.field, one.text) for one in problems],
            )

    def _check_pins(self, spec: ModelSpec, known: ModelSpec | None) -> None:
        """Raises `ModelDoesNotFit` where it pins more than all hosts have."""
        if promises_more(spec, known) and (refused := self._registry.pins([spec]).refused):
            raise ModelDoesNotFit(refused, param="pinned")

    def pin_warning(self, spec: ModelSpec) -> str:
        """Why it is not known whether a pinned model fits beside the others; empty: it is, or it is not pinned."""
        return self._registry.pins([spec]).warning if spec.pinned else ""

    def wrong_source(self, source: str) -> str:
        """Why a model may not come from there over the API; empty: it may."""
        if source in BUILT_IN or (of_hub(source) and _HUB_NAME.fullmatch(source)):
            return ""
        path = posixpath.normpath(source)
        if posixpath.isabs(source) and any(path.startswith(f"{one.rstrip('/')}/") for one in self._directories):
            return ""
        return (
            "Over the API a source is a hub name (ORGANISATION/NAME), a built-in name, or an absolute path below "
            f"{' or '.join(self._directories)} (RYZANSTEIN_MODEL_DIRECTORIES changes it)."
        )

    # --- what schedulers and hosts say -----------------------------------------------------------

    async def _refusal(self, model: str) -> RyzansteinError | None:
        """What the scheduler that decides has against it, within its time; None: it is on its way, or waits."""
        give_up = time.monotonic() + REFUSAL_TIMEOUT
        seen = self._registry.placements.get(model)
        while (left := give_up - time.monotonic()) > 0:
            news, plan = self._registry.news, self._registry.placements.get(model)
            moving = self._catalog.status(model).hosts or (plan is not None and plan.hosts)
            if moving:
                return None
            if plan is not None and plan.code and plan is not seen:
                break
            try:
                await asyncio.wait_for(news.wait(), left)
            except TimeoutError:
                break
        plan = self._registry.placements.get(model)
        if plan is None or not plan.code:
            return None
        error = error_from_code(plan.code, plan.reason)
        return error if isinstance(error, (ModelDoesNotFit, Unavailable)) else NoGroupAvailable(plan.reason)

    async def _command(self, hosts: Iterable[str], command: HostCommand, done: str = "") -> None:
        """Raises what a host has against it behind what is `done` all the same, and `Unavailable` where none
        answers."""
        gate = asyncio.Semaphore(COMMANDS_AT_ONCE)

        async def one(host: str) -> HostReply | BrokerUnavailable:
            async with gate:
                try:
                    subject = subjects.host_control(host)
                    return await self._bus.request(subject, command, HostReply, timeout=COMMAND_TIMEOUT)
                except BrokerUnavailable as error:
                    return error

        replies = await asyncio.gather(*map(one, hosts))
        if any(isinstance(reply, HostReply) and reply.ok for reply in replies):
            return
        for reply in replies:
            if isinstance(reply, BrokerUnavailable):
                raise Unavailable(f"{done}The host does not answer: {reply}", retry_after=2) from reply
            error = error_from_code(reply.code, done + reply.error)
            raise (error if isinstance(error, Unavailable) else _conflict(error.message, reply.code or "refused"))


def _object(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, Mapping):
        raise InvalidParameter(
            "The body must be an object with the fields of a model.", param=None, reason="invalid_type"
        )
    return dict(fields)


def _other_files(known: ModelSpec, spec: ModelSpec) -> bool:
    """Whether what was known of the model's tokens holds no longer."""
    return (known.source, known.revision) != (spec.source, spec.revision)


def _conflict(message: str, reason: str) -> RouteError:
    return RouteError(message, status=409, reason=reason, param="model")
