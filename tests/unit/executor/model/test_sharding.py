import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.model.sharding import HeadCounts, ShardLayout, Span, split, split_dimension
from shared.errors import ConfigurationError, ModelLoadError


class Config:
    def __init__(self, **values: object):
        self.__dict__.update(values)


@st.composite
def rings(draw: st.DrawFn) -> list[ShardLayout]:
    kv_heads = draw(st.integers(1, 24))
    total = HeadCounts(kv_heads * draw(st.integers(1, 12)), kv_heads, draw(st.sampled_from([32, 64, 128])))
    world_size = draw(st.integers(1, min(total.q_heads, 16)))
    return [ShardLayout.of(total, world_size, rank) for rank in range(world_size)]


@given(rings())
def test_every_q_head_is_on_exactly_one_rank_beside_its_kv_head(ring: list[ShardLayout]) -> None:
    total = ring[0].total
    group = total.q_heads // total.kv_heads
    assert [head for layout in ring for head in as_list(layout.q_heads)] == list(range(total.q_heads))
    for layout in ring:
        assert layout.q_heads.size == layout.q_per_kv * layout.kv_heads.size > 0
        for index, head in enumerate(as_list(layout.q_heads)):
            assert head // group == layout.kv_heads.start + index // layout.q_per_kv


@given(rings())
def test_kv_heads_are_stored_no_more_often_than_needed(ring: list[ShardLayout]) -> None:
    total = ring[0].total
    stored = [head for layout in ring for head in as_list(layout.kv_heads)]
    assert sorted(set(stored)) == list(range(total.kv_heads))
    assert len(stored) == max(total.kv_heads, len(ring))
    sizes = [layout.kv_heads.size for layout in ring]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 5000), st.integers(1, 16))
def test_dimensions_are_cut_without_gaps(size: int, parts: int) -> None:
    if size < parts:
        with pytest.raises(ConfigurationError, match=f"--tp {size} or less"):
            split_dimension(size, parts)
        return
    for spans in (split_dimension(size, parts), split(size, parts)):
        assert [row for span in spans for row in as_list(span)] == list(range(size))
        assert all(span.size > 0 for span in spans)


def test_known_splits() -> None:
    nine_over_three = [ShardLayout.of(HeadCounts(9, 3, 64), 2, rank) for rank in range(2)]
    assert [layout.q_heads for layout in nine_over_three] == [Span(0, 6), Span(6, 9)]
    assert [layout.kv_heads for layout in nine_over_three] == [Span(0, 2), Span(2, 3)]
    eight_over_two = [ShardLayout.of(HeadCounts(8, 2, 64), 3, rank) for rank in range(3)]
    assert [layout.q_heads for layout in eight_over_two] == [Span(0, 2), Span(2, 4), Span(4, 8)]
    assert [layout.kv_heads for layout in eight_over_two] == [Span(0, 1), Span(0, 1), Span(1, 2)]
    assert [span.size for span in split_dimension(1536, 5)] == [256, 320, 320, 320, 320]
    assert [span.size for span in split_dimension(131, 2)] == [65, 66]


def test_more_ranks_than_heads_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="use --tp 4 or less"):
        ShardLayout.of(HeadCounts(4, 2, 64), 5, 0)
    with pytest.raises(ConfigurationError, match="Rank 2"):
        ShardLayout.of(HeadCounts(4, 2, 64), 2, 2)


def test_head_counts_come_from_the_configuration() -> None:
    assert HeadCounts.from_config(Config(num_attention_heads=4, hidden_size=64)) == HeadCounts(4, 4, 16)
    assert HeadCounts.from_config(
        Config(num_attention_heads=4, num_key_value_heads=2, head_dim=128, hidden_size=64)
    ) == HeadCounts(4, 2, 128)


@pytest.mark.parametrize(
    ("values", "kv_heads"),
    [
        ({"num_kv_heads": 2}, 2),
        ({"num_kv_heads": 4, "multi_query": True}, 1),
        ({"num_kv_heads": 2, "multi_query": True, "new_decoder_architecture": True}, 2),
        ({"num_kv_heads": 4, "multi_query": False}, 4),
    ],
)
def test_kv_heads_under_the_names_of_falcon(values: dict[str, object], kv_heads: int) -> None:
    config = Config(num_attention_heads=4, hidden_size=64, **values)
    assert HeadCounts.from_config(config) == HeadCounts(4, kv_heads, 16)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"hidden_size": 64}, "num_attention_heads = None"),
        ({"num_attention_heads": [4, 8], "hidden_size": 64}, "other shapes per layer"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3, "head_dim": 8}, "do not group evenly"),
        ({"num_attention_heads": 3, "hidden_size": 64}, "must name head_dim"),
    ],
)
def test_configurations_without_uniform_heads_are_refused(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        HeadCounts.from_config(Config(**values))


def as_list(span: Span) -> list[int]:
    return list(range(span.start, span.stop))
