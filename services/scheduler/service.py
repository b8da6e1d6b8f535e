"""The scheduler service: connects intake, group view, sessions and router."""

import asyncio
import contextlib
from collections.abc import Iterator

from services.scheduler.groups import GroupTable
from services.scheduler.intake import RequestIntake
from services.scheduler.metrics import SchedulerMetrics, WaitingCollector, vllm_aliases
from services.scheduler.models.controller import HostedJobKind, ModelController
from services.scheduler.models.metrics import ModelLifecycleMetrics
from services.scheduler.placement import SessionPins
from services.scheduler.rejections import Rejections
from services.scheduler.request import WaitingRequest
from services.scheduler.router import Router
from services.scheduler.settings import SchedulerSettings
from services.scheduler.training.jobs import TrainingJobs
from shared.messages import CancelRequest, GroupEvent, GroupRecord, ModelPlacement, SessionPin
from shared.nats import subjects
from shared.nats.kv import Bucket
from shared.service.lifecycle import Service

# Seconds that a leaving scheduler takes to settle what was decided; the rest is delivered again.
SETTLE_TIMEOUT = 5.0


class SchedulerService(Service):
    """Places requests on groups. Several run side by side; what they must agree on lies in NATS."""

    name = "scheduler"
    traces = True
    job_kinds: tuple[HostedJobKind, ...] = (TrainingJobs,)

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._table = GroupTable(settings.suspect_time)
        self._metrics = SchedulerMetrics(self.registry, self._table.breakers)
        waiting = WaitingCollector(lambda: self._router.waiting if self._router else {}, self._table.served)
        self.registry.register(waiting)
        if settings.metrics_aliases:
            self.registry.register(vllm_aliases(waiting))
        self._intake: RequestIntake | None = None
        self._router: Router | None = None
        self._rejections: Rejections | None = None
        self._model_metrics = ModelLifecycleMetrics(self.registry)
        self._models: ModelController | None = None

    async def start(self) -> None:
        sessions = await Bucket.open(self.bus, subjects.SESSIONS_BUCKET, SessionPin, ttl=self._settings.session_ttl)
        pins = SessionPins(sessions, self._settings.session_ttl, self._settings.session_cache)
        rejections = self._rejections = Rejections(self.bus, self._metrics)
        intake = self._intake = RequestIntake(self.bus, self._settings, self._metrics, self._admit)
        models = self._models = ModelController(
            self.bus,
            self.instance,
            self._settings.model_lease,
            self._waiting,
            self._model_metrics,
            self._placed,
            self.registry,
            self.job_kinds,
        )
        router = self._router = Router(
            self.bus, self._settings, self._table, pins, rejections, self._metrics, intake.more_coming, models
        )
        self.spawn(pins.follow(), "sessions")
        self.spawn(rejections.run(), "rejections")
        self.spawn(router.tick(), "tick")
        await self.bus.subscribe(subjects.CANCEL, CancelRequest, router.cancel)
        await self.bus.subscribe(subjects.HEALTH_EVENTS, GroupEvent, self._on_event)
        await self._follow_groups(models)
        await models.start(self.spawn)
        self.spawn(intake.look_after(), "intake")
        await intake.start()

    async def stop(self) -> None:
        if self._intake is None or self._router is None or self._rejections is None:
            return
        if self._models is not None:
            await self._models.stop()
        await self._intake.stop_pulling()
        await self._router.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._rejections.drained(), SETTLE_TIMEOUT)
        await self._intake.give_back()

    def _admit(self, item: WaitingRequest, *, crowded: bool) -> bool:
        assert self._router is not None, "intake starts after the router"
        return self._router.admit(item, crowded=crowded)

    def _waiting(self) -> Iterator[tuple[str, int, float]]:
        if self._router is not None:
            yield from self._router.demand()

    def _placed(self, model: str, placement: ModelPlacement | None) -> None:
        if self._router is not None:
            self._router.placed(model, placement)

    async def _follow_groups(self, models: ModelController) -> None:
        """Returns once every group that is recorded is known; goes on in the background."""
        known = asyncio.Event()
        bucket = await Bucket.open(self.bus, subjects.GROUPS_BUCKET, GroupRecord)

        def note(name: str, record: GroupRecord | None) -> None:
            if record is None:
                self._table.forget(name)
                models.forget_group(name)
            else:
                self._table.record(record)
                models.group(record)
            self._wake()

        self.spawn(bucket.follow(note, known.set), "groups")
        await known.wait()

    async def _on_event(self, event: GroupEvent) -> None:
        self._table.event(event)
        self._wake()

    def _wake(self) -> None:
        if self._router is not None:
            self._router.wake()
