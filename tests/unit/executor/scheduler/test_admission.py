"""A ring takes nothing that another one's gateway could make as large as it likes."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.executor.core.engine import EngineSpec
from services.executor.scheduler.admission import Admission, too_long
from services.executor.scheduler.features.catalog import FEATURES
from shared import limits
from shared.errors import RyzansteinError
from shared.messages import GenerationRequest, Grammar, SamplingParams, SparseAttention

SPEC = EngineSpec(block_size=16, num_blocks=1 << 20, context_length=256, vocab_size=1 << 21)
MANY = 1 << 20
# By type, the ways in which a field of it can be large.
HUGE: dict[Any, list[Any]] = {
    str: ["a" * MANY],
    list[int]: [[1] * MANY],
    Sequence[int]: [[1] * MANY],
    list[list[int]]: [[[1]] * MANY, [[1] * MANY]],
    dict[int, float]: [dict.fromkeys(range(MANY), 1.0)],
    Grammar | None: [Grammar("regex", "a" * MANY)],
}
SMALL = (int, float, bool, SparseAttention | None)


def request(sampling: SamplingParams | None = None, **fields: Any) -> GenerationRequest:
    usual = {"generation_id": "g", "request_id": "r", "model": "m", "consumer": "c", "prompt": [1], "max_tokens": 8}
    return GenerationRequest(**(usual | fields), sampling=sampling or SamplingParams())


def malformed(given: GenerationRequest, spec: EngineSpec) -> RyzansteinError | None:
    return Admission(spec, [feature.checks for feature in FEATURES]).malformed(given)


def cases() -> list[Any]:
    """Every field of the message that can be large at all, as large as the broker lets it be."""
    found = []
    for kind in (GenerationRequest, SamplingParams):
        for field in msgspec.structs.fields(kind):
            if field.type in SMALL or field.name in ("sampling", "lane"):
                continue
            assert field.type in HUGE, f"say here how {field.name} can be large, and bound it"
            found += [pytest.param(kind, field.name, value, id=field.name) for value in HUGE[field.type]]
    return found


def refused(given: GenerationRequest) -> str:
    problem = malformed(given, SPEC) or too_long(given, SPEC)
    return problem.message


def of(kind: type, name: str, value: Any) -> GenerationRequest:
    return request(**{name: value}) if kind is GenerationRequest else request(SamplingParams(**{name: value}))


@pytest.mark.parametrize(("kind", "name", "value"), cases())
def test_every_field_that_can_be_large_has_a_bound(kind: type, name: str, value: Any) -> None:
    said = refused(of(kind, name, value))
    assert "(limit " in said or name in ("prompt", "generated"), said
    assert len(said) < 1000


AT_THE_LIMIT = [
    (GenerationRequest, "stop_token_ids", limits.RING_STOP_TOKENS, [3]),
    (GenerationRequest, "prediction", None, [3]),
    (SamplingParams, "allowed_token_ids", limits.ALLOWED_TOKENS, [3]),
    (SamplingParams, "bad_words", limits.RING_BAD_WORDS, [[3, 4]]),
]


@pytest.mark.parametrize(("kind", "name", "limit", "one"), AT_THE_LIMIT)
def test_so_many_are_taken_and_no_more(kind: type, name: str, limit: limits.Limit | None, one: list[Any]) -> None:
    most = SPEC.context_length if limit is None else limit.value
    assert malformed(of(kind, name, one * most), SPEC) is None
    assert f"{most:,}" in refused(of(kind, name, one * (most + 1)))


def test_a_bias_for_so_many_tokens_is_taken_and_for_no_more() -> None:
    most = limits.LOGIT_BIASES.value
    assert malformed(request(SamplingParams(logit_bias=dict.fromkeys(range(most), 1.0))), SPEC) is None
    assert "limit logit_biases" in refused(request(SamplingParams(logit_bias=dict.fromkeys(range(most + 1), 1.0))))


@pytest.mark.parametrize("adapter", ["x", "a" * 63, "A" * 64, "g" * 64, "../" + "a" * 61])
def test_an_adapter_is_named_by_its_digest(adapter: str) -> None:
    spec = msgspec.structs.replace(SPEC, max_adapters=2)
    problem = malformed(request(adapter=adapter), spec)
    assert "hexadecimal" in problem.message


def test_a_ring_without_slots_for_adapters_refuses_them() -> None:
    assert "computes no LoRA adapters" in refused(request(adapter="ab" * 32))
    assert malformed(request(adapter="ab" * 32), msgspec.structs.replace(SPEC, max_adapters=1)) is None


def test_sparse_attention_that_the_group_does_not_compute_is_refused() -> None:
    asked = request(sparse=SparseAttention())
    assert "no sparse attention" in refused(asked)
    windows = msgspec.structs.replace(SPEC, sparse=["window"])
    problem = malformed(asked, windows)
    assert "--sparse-attention" in problem.message
    assert malformed(request(sparse=SparseAttention("window")), windows) is None
