"""What stands in for the turns of large requests."""

from services.gateway.core.large_requests import LARGE_REQUEST, LargeRequests
from shared.errors import QueueFull


async def no_room(requests: LargeRequests, tenant: str, size: int) -> None:
    """`LargeRequests.turn` while others wait."""
    if size > LARGE_REQUEST:
        raise QueueFull("The gateway has no room for more large requests.", retry_after=1)
