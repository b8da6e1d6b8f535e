import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.core.sharding import HeadCounts, ShardLayout, ShardRange, SharedHead, split, split_dimension
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
def test_every_q_head_goes_out_from_exactly_one_rank_that_holds_its_kv_head(ring: list[ShardLayout]) -> None:
    total = ring[0].total
    group = total.q_heads // total.kv_heads
    assert [head for layout in ring for head in as_list(layout.output_heads)] == list(range(total.q_heads))
    for layout in ring:
        assert set(as_list(layout.output_heads)) <= set(as_list(layout.q_heads))
        assert layout.q_heads.size == layout.q_per_kv * layout.kv_heads.size > 0
        for index, head in enumerate(as_list(layout.q_heads)):
            assert head // group == layout.kv_heads.start + index // layout.q_per_kv


@given(rings())
def test_no_rank_stores_more_kv_heads_than_some_rank_must(ring: list[ShardLayout]) -> None:
    total = ring[0].total
    stored = [head for layout in ring for head in as_list(layout.kv_heads)]
    assert sorted(set(stored)) == list(range(total.kv_heads))
    sizes = [layout.kv_heads.size for layout in ring]
    assert max(sizes) == -(-total.kv_heads // len(ring))
    assert max(sizes) - min(sizes) <= 1


@given(rings())
def test_shared_heads_are_held_by_two_neighbours_that_make_all_equal(ring: list[ShardLayout]) -> None:
    total, ranks = ring[0].total, len(ring)
    by_slot: dict[int, list[tuple[int, int, bool, int]]] = {}
    for layout in ring:
        assert len(layout.shared_heads) <= 2
        work = layout.kv_heads.size * ranks
        for shared in layout.shared_heads:
            head = layout.kv_heads.start + shared.kv_head
            assert head in as_list(layout.kv_heads)
            by_slot.setdefault(shared.slot, []).append((layout.rank, head, shared.is_first, shared.first_share))
            work -= ranks - shared.first_share if shared.is_first else shared.first_share
        if layout.num_shared_heads:
            assert work == total.kv_heads, "every rank attends as much as the others"
    assert sorted(by_slot) == list(range(ring[0].num_shared_heads))
    for (rank, head, is_first, share), (other, *rest) in by_slot.values():
        assert other == rank + 1
        assert rest == [head, not is_first, share]
        assert 0 < share < ranks


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
    assert [layout.q_heads for layout in nine_over_three] == [ShardRange(0, 6), ShardRange(3, 9)]
    assert [layout.kv_heads for layout in nine_over_three] == [ShardRange(0, 2), ShardRange(1, 3)]
    assert [layout.output_heads for layout in nine_over_three] == [ShardRange(0, 4), ShardRange(4, 9)]
    assert [layout.shared_heads for layout in nine_over_three] == [
        [SharedHead(kv_head=1, slot=0, is_first=True, first_share=1)],
        [SharedHead(kv_head=0, slot=0, is_first=False, first_share=1)],
    ]
    # Sharing would give the second of three ranks three heads of five; of seventeen, two ranks balance well enough.
    five_over_three = [ShardLayout.of(HeadCounts(5, 5, 64), 3, rank) for rank in range(3)]
    assert [layout.kv_heads for layout in five_over_three] == [ShardRange(0, 2), ShardRange(2, 4), ShardRange(4, 5)]
    assert ShardLayout.of(HeadCounts(17, 17, 64), 2, 0).num_shared_heads == 0
    eight_over_two = [ShardLayout.of(HeadCounts(8, 2, 64), 3, rank) for rank in range(3)]
    assert [layout.q_heads for layout in eight_over_two] == [ShardRange(0, 2), ShardRange(2, 4), ShardRange(4, 8)]
    assert [layout.kv_heads for layout in eight_over_two] == [ShardRange(0, 1), ShardRange(0, 1), ShardRange(1, 2)]
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


def as_list(span: ShardRange) -> list[int]:
    return list(range(span.start, span.stop))
