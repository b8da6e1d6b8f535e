"""What a request costs, in tokens: the unit of fairness between tenants."""

EXPECTED_OUTPUT = 256
"""Output tokens that a request is reckoned with at most: limits are often the whole context, answers are not."""


def cost(tokens: int, output_left: int) -> int:
    """Of a request with `tokens` tokens to compute before its next one, and `output_left` to produce at most."""
    return max(1, tokens + max(0, min(output_left, EXPECTED_OUTPUT)))
