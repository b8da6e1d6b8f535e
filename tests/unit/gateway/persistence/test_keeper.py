"""Whether an answer is written, and how often that is tried."""

import msgspec
import pytest

from services.gateway.lifecycle.request_state import RequestState
from services.gateway.persistence import keeper
from services.gateway.persistence.keeper import TRIES, ResponseArchive
from shared.errors import BrokerUnavailable
from tests.unit.gateway.dialects.responses.test_events import answer_for


class Shelf:
    """Takes an answer once it has refused `refused` times."""

    def __init__(self, refused: int = 0) -> None:
        self.refused = refused
        self.asked = 0
        self.kept: list[str] = []

    async def put(self, answer: RequestState) -> None:
        self.asked += 1
        if self.asked <= self.refused:
            raise BrokerUnavailable("not now")
        self.kept.append(answer.identity)


def stored() -> RequestState:
    answer = answer_for()
    assert answer.record.response is not None
    answer.record = msgspec.structs.replace(
        answer.record, response=msgspec.structs.replace(answer.record.response, store=True)
    )
    return answer


@pytest.mark.parametrize(("refused", "kept"), [(0, 1), (1, 1), (TRIES, 0)])
async def test_what_is_refused_is_tried_again(refused: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "PAUSE", 0.0)
    shelf = Shelf(refused)
    await ResponseArchive(shelf, Shelf()).keep(stored())  # type: ignore[arg-type]
    assert (shelf.asked, len(shelf.kept)) == (min(refused + 1, TRIES), kept)


async def test_what_was_cancelled_before_its_id_was_known_is_not_written() -> None:
    answer, shelf = answer_for(), Shelf()
    answer.record = msgspec.structs.replace(
        answer.record, endpoint="chat.completions", response=None, store=True, stream=False
    )
    answer.generations[0].state = "cancelled"
    await ResponseArchive(Shelf(), shelf).keep(answer)  # type: ignore[arg-type]
    assert (answer.record.outlives, answer.resumable, shelf.asked) == (True, False, 0)
