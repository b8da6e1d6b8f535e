"""What the record of a response is made of, once the sampling of its chat is known. Pure."""

from collections.abc import Sequence

import msgspec

from services.gateway.responses.items import Item
from services.gateway.responses.schemas import ResponseRequest
from services.gateway.responses.translation import shown_fields
from shared.messages import SamplingParams
from shared.messages.records import ResponseRecord


class MakeResponse(msgspec.Struct, frozen=True):
    """What the record of a response is made of."""

    identity: str
    request: ResponseRequest
    items: Sequence[Item]

    def record(self, sampling: SamplingParams) -> ResponseRecord:
        request = self.request
        shown = shown_fields(request, sampling.temperature, sampling.top_p)
        return ResponseRecord(
            shown=msgspec.json.encode(shown),
            items=msgspec.json.encode(self.items),
            previous=(request.previous_response_id or "")[-32:],
            store=request.store is not False,
            background=bool(request.background),
        )
