"""Where a rank's heads lie in projections that compute several things at once.

Pure arithmetic over `ShardLayout`, in rows of the weight (outputs of the projection), head size d:

    blocks      [q0 q1 q2 q3 | k0 k1 | v0 v1]             rank 0 of 2: q0-q1, k0, v0
    by group    [q0 q1 k0 v0 | q2 q3 k1 v1]               rank 0 of 2: the first group
    halves      [gate | up]                               the same span of each
"""

from services.executor.model.sharding import ShardLayout, Span


def halves(span: Span, width: int) -> tuple[Span, ...]:
    """`span` of each of two projections of `width` that stand one after the other."""
    return merged([span, shifted(span, width)])


def blocks(layout: ShardLayout) -> tuple[Span, ...]:
    """This rank's rows of [all q | all k | all v]."""
    size, total = layout.head_dim, layout.total
    keys = layout.kv_heads.scaled(size)
    first_key = total.q_heads * size
    first_value = first_key + total.kv_heads * size
    return merged(
        [layout.q_heads.scaled(size), shifted(keys, first_key), shifted(keys, first_value)],
    )


def by_group(layout: ShardLayout) -> tuple[Span, ...]:
    """This rank's rows of [queries of KV head 0, its key, its value | the same of KV head 1 | ...]."""
    size = layout.head_dim
    group = layout.total.q_heads // layout.total.kv_heads
    spans = []
    for index in range(layout.kv_heads.size):
        head = layout.kv_heads.start + index
        first = layout.q_heads.start + index * layout.q_per_kv - head * group
        start = head * (group + 2)
        spans.append(Span(start + first, start + first + layout.q_per_kv).scaled(size))
        spans.append(Span(start + group, start + group + 2).scaled(size))
    return merged(spans)


def shifted(span: Span, by: int) -> Span:
    return Span(span.start + by, span.stop + by)


def merged(spans: list[Span]) -> tuple[Span, ...]:
    """The same rows with neighbours joined, so that they are read at once."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)
