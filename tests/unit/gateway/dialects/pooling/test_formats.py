"""What scores are made of."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.dialects.pooling.formats import answered, cosine, probabilities

LOGITS = st.floats(-1e4, 1e4, width=32)
VECTORS = st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3)


@given(st.lists(LOGITS, min_size=1, max_size=8))
def test_probabilities_keep_the_order_of_logits(logits: list[float]) -> None:
    for activation in ("sigmoid", "softmax", "identity"):
        shown = probabilities(logits, activation)
        for first, second in pairwise(logits):
            assert (first <= second) <= (shown[logits.index(first)] <= shown[logits.index(second)])
        if activation == "identity":
            assert shown == logits
        else:
            assert all(0 <= one <= 1 for one in shown)
    if len(logits) > 1:
        assert math.isclose(sum(probabilities(logits, "softmax")), 1)


def test_the_known_values() -> None:
    assert probabilities([0.0], "softmax") == probabilities([0.0], "sigmoid") == [0.5]
    assert probabilities([math.log(3), 0.0], "softmax") == pytest.approx([0.75, 0.25])
    assert answered(math.log(0.3), math.log(0.1)) == pytest.approx(0.75)
    assert answered(-1e6, 0.0) < 1e-300
    assert cosine([3.0, 4.0], [6.0, 8.0]) == pytest.approx(1)
    assert cosine([1.0, 0.0], [0.0, 2.0]) == 0
    assert cosine([0.0, 0.0], [1.0, 1.0]) == 0


@given(VECTORS, VECTORS)
def test_a_cosine_is_symmetric_and_bounded(first: list[float], second: list[float]) -> None:
    assert cosine(first, second) == cosine(second, first)
    assert abs(cosine(first, second)) <= 1 + 1e-9
