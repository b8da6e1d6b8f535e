"""A rank that serves a tiny model without one line of a list.

`python -m tests.unit.executor.worker.without_line CATALOG NAME PACKAGE MODEL`: `NAME` is left out of the module
`CATALOG`, and `PACKAGE`, where it has its code, cannot be imported. Writes what computed, and how many tokens came.
"""

import re
import sys
import tempfile
from importlib.util import find_spec, module_from_spec
from pathlib import Path

TOKENS = 6


def leave_out(catalog: str, name: str, package: str) -> None:
    spec = find_spec(catalog)
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    left, imports = re.subn(rf"^from .* import {name}\n", "", source, flags=re.MULTILINE)
    left, entries = re.subn(rf"(?<=\(){name}\(\), (\w+\(\))(?=\)$)", r"\1,", left, flags=re.MULTILINE)
    left, last = re.subn(rf", {name}\(\)(?=\)$)", ",", left, flags=re.MULTILINE)
    assert (imports, entries + last) == (1, 1), "its import and its entry"
    module = module_from_spec(spec)
    exec(compile(left, spec.origin, "exec"), module.__dict__)
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
