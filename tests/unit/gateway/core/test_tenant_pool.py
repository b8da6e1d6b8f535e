"""What a gateway holds is bounded for each tenant and for all, and every refusal names the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.tenant_pool import Bound, TenantPool
from shared.errors import QueueFull
from shared.limits import GENERATIONS, TENANT_GENERATIONS

WHOLE, SHARE = Bound(GENERATIONS, 16), Bound(TENANT_GENERATIONS, 6)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.integers(1, 9)), max_size=30))
def test_nobody_holds_more_than_may_be_held(takes: list[tuple[str, int]]) -> None:
    pool, held = TenantPool(WHOLE, "places", SHARE, strict=True), list[tuple[str, int]]()
    for take in takes:
        mine = sum(size for tenant, size in held if tenant == take[0])
        fits = mine + take[1] <= 6 and sum(size for _, size in held) + take[1] <= 16
        if fits:
            pool.take(*take)
            held.append(take)
        else:
            with pytest.raises(QueueFull):
                pool.take(*take)
    for one in held:
        pool.give_back(*one)
    pool.take("a", 6)


def test_a_tenants_own_others_do_not_refuse_anothers() -> None:
    pool = TenantPool(WHOLE, "places")
    pool.take("a", 9)  # more than a quarter, and nothing beside it
    with pytest.raises(
        QueueFull, match=r"no room for more places: your other requests hold 9; .*limit generations: 16 .*a quarter"
    ):
        pool.take("a", 1)
    pool.take("b", 4)
    with pytest.raises(QueueFull, match="other requests hold 13"):
        pool.take("c", 4)
    pool.take("b", 2, held=4)  # by the same request


def test_without_keys_there_is_one_tenant_which_has_all() -> None:
    pool = TenantPool(WHOLE, "places", SHARE, strict=True)
    pool.take("", 16)
    with pytest.raises(QueueFull, match="RYZANSTEIN_MAX_GENERATIONS changes it"):
        pool.take("", 1)
