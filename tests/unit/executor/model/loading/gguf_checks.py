"""What is held of each architecture of GGUF files: settings, weights and logits of what is read are the model's, the
kernels compute with its codes, and what is missing is named."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.model.conversion.convert import convert
from services.executor.model.loading.checkpoints import convert_gguf
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.parallel.layers import WeightShard
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.worker.runner import ModelRunner
from shared.errors import ModelLoadError
from tests.unit.executor.cpu.test_decoder import errors, runner_of, truth
from tests.unit.executor.model.gguf_models import Changes, Keys
from tests.unit.executor.model.ring import CPU, decode_script, make_runner, mixed_script, on_ring
from tests.unit.executor.model.tiny import auto_class, logits_of

NOT_OF_THE_FILE = {"_name_or_path", "architectures", "dtype", "transformers_version"} | {
    f"{token}_token_id" for token in ("bos", "eos", "pad")
}
# A model by its name, what its file has otherwise (None: not at all), and what is said of it.
Wrong = tuple[str, Keys, Changes, str]
WITHIN = 1e-4  # of a logit, float32


def assert_model(
    made: Path,
    ranks: int,
    plain: Any,
    expected: Mapping[str, Tensor] | None = None,
    *,
    within: float = 1e-6,
    unsaid: Collection[str] = (),
    spread: float = 0.1,
) -> None:
    """`made` is transformers' model `plain`: its weights (where `expected` does not say others), its settings but for
    those that its file leaves `unsaid`, its logits on a ring of so many ranks; flatter ones than `spread` would show
    nothing."""
    close(held_by(load(made, torch.float32)), held_by(plain) if expected is None else expected, within)
    assert_settings(made, plain.config, unsaid)
    assert_logits(made, ranks, partial(logits_of, plain), spread)


def assert_settings(made: Path, config: Any, other: Collection[str]) -> None:
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


def assert_logits(made: Path, ranks: int, truth: Callable[[list[list[int]]], Sequence[Tensor]], spread: float) -> None:
    """A ring computes from `made` what `truth` has for texts, [tokens, vocabulary] each."""
    script, steps = decode_script()
    truths = truth(script.sequences)
    assert truths[0].std() > spread, "logits too flat for the comparison to mean anything"

    def work(member: Any) -> list[Any]:
        runner = make_runner(made, member)
        return [runner.forward(plan) for plan, _ in steps]

    for rows, (_, sampled) in zip(on_ring(ranks, work)[0], steps, strict=True):
        for row, (sequence, position) in zip(rows, sampled, strict=True):
            assert torch.allclose(row, truths[sequence][position], rtol=0, atol=WITHIN)


def converted(file: Path, *, unpacked: bool = False) -> Path:
    target = file.with_name("unpacked" if unpacked else "linked")
    if unpacked and not target.exists():
        convert(file, target, "safetensors", "bf16", lambda *stage: None)
    elif not unpacked:
        convert_gguf(file, target, lambda *stage: None)
    return target


def load(directory: Path, dtype: torch.dtype, *, keep_codes: bool = False, defer_codes: bool = False) -> Any:
    layout = ShardLayout.from_config(load_config(directory), 1, 0)
    how = {"keep_codes": keep_codes, "defer_codes": defer_codes}
    return load_model(directory, dtype, layout, SingleRank(), CPU, lambda done, total: None, **how)


def theirs(source: Path) -> Any:
    """The model by transformers."""
    kind = auto_class(load_config(source))
    return kind.from_pretrained(str(source), dtype=torch.float32, attn_implementation="eager")


def values_of(model: Any) -> dict[str, Tensor]:
    """All parameters in float32, quantized ones too."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = model.get_submodule(name.rpartition(".")[0])
        stored = owner.stored if isinstance(owner, WeightShard) and name.endswith(".weight") else parameter
        if isinstance(stored, DeferredRows):
            stored = stored.read()
        found[name] = stored.dequantized() if isinstance(stored, QuantizedRows) else stored.detach().float()
    return found


def held_by(model: Any) -> dict[str, Tensor]:
    """Parameters and what is learned beside them: corrections of a router."""
    found = values_of(model)
    return found | {name: tensor for name, tensor in model.named_buffers() if name.endswith("correction_bias")}


def close(found: dict[str, Tensor], expected: Mapping[str, Tensor], within: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.allclose(value, expected[name].float(), rtol=0, atol=within), name


def assert_codes(made: Path, unpacked: tuple[str, ...] = ()) -> None:
    """Weights stay packed but for those whose names end as `unpacked` says, and stand for what they are unpacked to."""
    model = load(made, torch.float32, keep_codes=True)
    for key, module in model.named_modules():
        if isinstance(module, WeightShard):
            assert isinstance(module.stored, QuantizedRows) != key.endswith(unpacked), key
    close(held_by(model), held_by(load(made, torch.float32)))
    close(held_by(load(made, torch.float32, keep_codes=True, defer_codes=True)), held_by(model), within=0)


def assert_as_near_as_own_codes(made: Path) -> ModelRunner:
    """Products round activations to int8, as they do for the same values in codes of our own; heads in another order
    are ten times as far off. Returns what computed with the codes of `made`."""
    plain, unpacked = load(made, torch.float32), made.with_name("own")
    whole = auto_class(plain.config).from_config(plain.config, dtype=torch.float32)
    whole.load_state_dict({**whole.state_dict(), **values_of(plain), **dict(plain.named_buffers())}, strict=False)
    whole.save_pretrained(str(unpacked))
    expected = truth(unpacked, mixed_script()[0].sequences)
    runner, ours = runner_of(made, native=True), runner_of(unpacked, native=True, weights="q8_0")
    assert errors(runner, expected).mean() < 1.3 * errors(ours, expected).mean()
    return runner


def assert_near_what_is_unpacked(file: Path, runner: ModelRunner) -> None:
    """What int8 activations add is as much as int8 weights do."""
    unpacked = converted(file, unpacked=True)
    expected = truth(unpacked, mixed_script()[0].sequences)
    spread = torch.stack([row.std() for row in expected]).mean()
    plain = errors(runner_of(unpacked, native=True), expected)
    assert errors(runner, expected).mean() < plain.mean() + 0.05 * spread


@contextmanager
def refused(message: str) -> Iterator[None]:
    """What is done here ends with `message`, in one line."""
    with pytest.raises(ModelLoadError, match=message) as raised:
        yield
    assert "\n" not in str(raised.value)


def assert_refused(file: Path, message: str) -> None:
    with refused(message):
        load(converted(file), torch.float32)
