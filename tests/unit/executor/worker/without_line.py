"""A rank that serves a tiny model without one line of a list.

`python -m tests.unit.executor.worker.without_line CATALOG NAME PACKAGE MODEL`: `NAME` is left out of the module
`CATALOG`, and `PACKAGE`, where it has its code, cannot be imported. Writes what computed, and how many tokens came.
"""

import sys
import tempfile
from importlib.util import find_spec, module_from_spec
from pathlib import Path

TOKENS = 6


def leave_out(catalog: str, name: str, package: str) -> None:
    spec = find_spec(catalog)
    assert spec is not None
    assert spec.origin is not None
    lines = Path(spec.origin).read_text().splitlines()
    left = [line for line in lines if name not in line]
    assert len(left) == len(lines) - 2, "its import and its line"
    module = module_from_spec(spec)
    exec(compile("\n".join(left), spec.origin, "exec"), module.__dict__)
    sys.modules[catalog] = module
    sys.modules[package] = None  # type: ignore[assignment]  # importing it fails


def serve(model: Path) -> None:
    from shared.messages import SamplingParams
    from tests.unit.executor.worker.drafting_ring import Generated, ring_of

    with tempfile.TemporaryDirectory() as scratch:
        options = {"device": "auto", "dtype": "bf16", "kv_dtype": "auto"}
        with ring_of(Path(scratch), model, **options) as ring:
            text = Generated(ring, [1, 2, 3], SamplingParams(temperature=0.0)).run(TOKENS).text
            sys.stdout.write(f"{ring.spec.kernels}, {len(text)}\n")


if __name__ == "__main__":
    leave_out(*sys.argv[1:4])
    serve(Path(sys.argv[4]))
