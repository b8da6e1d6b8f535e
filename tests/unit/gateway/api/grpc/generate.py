"""Makes the Python code of `protos/`: `python -m tests.unit.gateway.api.grpc.generate`, or `make protos`."""

import tempfile
from importlib.metadata import distribution
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).parents[5]
PROTOS = ROOT / "protos"
GENERATED = ROOT / "services" / "gateway" / "api" / "grpc" / "generated"
SOURCE = "ryzanstein/v1/inference.proto"


def generate(folder: Path) -> list[Path]:
    """Writes the module and its types into `folder`."""
    # The module imports nothing of ours, so it need not lie where the proto's path says.
    google = distribution("googleapis-common-protos").locate_file("")
    with tempfile.TemporaryDirectory() as out:
        code = protoc.main(
            [
                "protoc",
                f"-I{PROTOS}",
                f"-I{google}",
                f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
                f"--python_out={out}",
                f"--pyi_out={out}",
                SOURCE,
            ]
        )
        if code:
            raise RuntimeError(f"protoc failed with {code}.")
        made = sorted((Path(out) / SOURCE).parent.iterdir())
        return [(folder / path.name, (folder / path.name).write_bytes(path.read_bytes()))[0] for path in made]


if __name__ == "__main__":
    generate(GENERATED)
