"""Each kind of work of `benchmarks.engine.dtypes` is done, in each dtype, on the smallest models."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.engine import dtypes
from services.executor.native import library
from tests.unit.executor.model.lanes import in_lanes

SMALL = {"hidden_size": 384, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 256}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of what peft calls
@pytest.mark.skipif(bool(library.why_not()), reason=f"native kernels: {library.why_not()}")
@pytest.mark.parametrize(
    "kind", in_lanes(dtypes.KINDS, (), ("draft head", "classifier", "fine-tuning", "merge an adapter"))
)
def test_every_kind_is_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    for name, value in zip(("HIDDEN", "INNER", "LAYERS", "VOCABULARY"), SMALL.values(), strict=True):
        monkeypatch.setattr(dtypes, name, value)
    monkeypatch.setattr(dtypes, "SHAPE", SMALL)
    monkeypatch.setitem(dtypes.WORDS, "vocab", {f"t{token}": token for token in range(256)})
    with ExitStack() as stack:
        bench = dtypes.Bench(tmp_path, 1, stack)
        for dtype in dtypes.DTYPES:
            bench.work(kind, dtype)()
