"""What is held of each architecture of GGUF files: settings and logits of what is read are the model's own."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.executor.model.loading.loader import load_config
from tests.unit.executor.model.ring import decode_script, make_runner, on_ring

NOT_OF_THE_FILE = {"_name_or_path", "architectures", "dtype", "transformers_version"} | {
    f"{token}_token_id" for token in ("bos", "eos", "pad")
}
WITHIN = 1e-4  # of a logit, float32


def assert_settings(made: Path, config: Any, other: Collection[str] = ()) -> None:
    """Those that models of the type of `config` have are the same in `made`, but for `other` ones and the file's."""
    before, after = config.to_dict(), load_config(made).to_dict()
    for key in (before.keys() & type(config)().to_dict().keys()) - NOT_OF_THE_FILE - {*other}:
        assert after[key] == _rounded(before[key]), key


def _rounded(value: Any) -> Any:
    """Files have numbers of 32 bits."""
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return pytest.approx(value) if isinstance(value, float) else value


def assert_logits(
    made: Path, ranks: int, truth: Callable[[Sequence[Sequence[int]]], Sequence[Tensor]], spread: float = 0.1
) -> None:
    """A ring computes from `made` what `truth` has for texts, [tokens, vocabulary] each; flatter ones than `spread`
    would show nothing."""
    script, steps = decode_script()
    truths = truth(script.sequences)
    assert truths[0].std() > spread, "logits too flat for the comparison to mean anything"

    def work(member: Any) -> list[Any]:
        runner = make_runner(made, member)
        return [runner.forward(plan) for plan, _ in steps]

    for rows, (_, sampled) in zip(on_ring(ranks, work)[0], steps, strict=True):
        for row, (sequence, position) in zip(rows, sampled, strict=True):
            assert torch.allclose(row, truths[sequence][position], rtol=0, atol=WITHIN)
