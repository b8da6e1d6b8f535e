"""A ring's hand-overs, both ways, as its leader sees them."""

import asyncio
from collections.abc import Callable

import structlog

from services.executor.core.engine import EngineSpec
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.kv_transfer.board import HandoverBoard, OwnRing
from services.executor.kv_transfer.exchange import Exchange
from services.executor.kv_transfer.receiver import HandoverReceiver
from services.executor.kv_transfer.sender import HandoverSender, PinMover
from shared.errors import RyzansteinError
from shared.messages.groups import HandoverMessage, HandoverReply
from shared.nats import subjects
from shared.nats.bus import Bus

log = structlog.get_logger(__name__)


class Handover:
    """Takes sessions over while the ring serves, and gives them away when it leaves. A ring whose engine has no KV
    bytes does neither."""

    def __init__(
        self,
        settings: ExecutorSettings,
        spec: RankSpec,
        engine_spec: EngineSpec,
        exchange: Exchange,
        receivable: Callable[[], int],
        model: str,
        wake: Callable[[], object],
    ) -> None:
        """`receivable`: how many blocks the ring has room for."""
        self._settings = settings
        self._spec = spec
        self._engine_spec = engine_spec
        self._exchange = exchange
        self._receivable = receivable
        self._model = model
        self._wake = wake
        self._board = HandoverBoard.beside(spec.board, spec.world_size) if engine_spec.kv_format else None
        self._bus: Bus | None = None
        self._taker: HandoverReceiver | None = None
        self._giver: HandoverSender | None = None
        self._giving: asyncio.Task[None] | None = None

    async def open(self, bus: Bus, fingerprint: str) -> None:
        """Listens for offers. `fingerprint`: of the model and of all that its numbers depend on."""
        self._bus = bus
        if self._board is None or self._settings.nnodes > 1:  # other hosts' ranks report elsewhere
            return
        spec = self._engine_spec
        self._ring = OwnRing(
            self._spec.group,
            self._spec.epoch,
            self._model,
            f"{fingerprint}/{self._spec.world_size}/{spec.kv_format}",
            self._settings.ring_host,
            spec.block_size,
            spec.kv_block_bytes,
        )
        self._taker = HandoverReceiver(self._exchange, self._board, self._ring, self._receivable, self._wake)
        subject = subjects.handover(self._spec.group)
        await bus.subscribe(subject, HandoverMessage, self._on_message)  # type: ignore[arg-type]

    async def _on_message(self, message: HandoverMessage) -> HandoverReply:
        assert self._taker is not None, "open makes it"
        refusal = "It is draining too." if self._giving is not None else ""
        return await self._taker.answer(message, refusal)

    # --- giving ----------------------------------------------------------------------------------

    def begin(self, finished: Callable[[], bool]) -> None:
        """The ring leaves: gives its sessions away. `finished`: whether its last generation has ended."""
        timeout = self._settings.handover_timeout
        if self._giving or self._taker is None or self._board is None or self._bus is None or not timeout:
            return
        pins = PinMover(self._bus, self._model, self._spec.group, self._settings.session_ttl)
        self._giver = HandoverSender(self._bus, self._exchange, self._board, pins, self._ring, self._wake)
        self._giving = asyncio.create_task(self._give(self._giver, finished, timeout))

    async def _give(self, giver: HandoverSender, finished: Callable[[], bool], timeout: float) -> None:
        try:
            await giver.run(finished, timeout)
        except RyzansteinError as error:
            log.warning("handover_failed", error=str(error))
        except Exception:  # the ring leaves all the same
            log.exception("handover_failed")
        finally:
            self._wake()

    def stop(self) -> None:
        """The ring stays after all."""
        if self._giver is not None:
            self._giver.stop()
        self._giver = self._giving = None

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for before the ring ends."""
        return self._giving is None or self._giving.done()
