"""Compiles the modules that pyproject.toml names under [tool.ryzanstein] with mypyc, into wheels alone (ADR 0034).

An editable install and `build_ext --inplace` leave them out: a compiled module in the tree would go before its source.
"""

import os
import shutil
import tempfile
import tomllib
import warnings
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

OPTIONAL = "RYZANSTEIN_COMPILE"
"""0: not at all; 1: a build that cannot fails. Unset: where mypy and a C compiler are."""


class BuildExtensions(build_ext):
    """The kernels, and the compiled modules beside their sources."""

    def run(self) -> None:
        super().run()
        wanted = os.environ.get(OPTIONAL, "")
        if self.inplace or self.editable_mode or wanted == "0":
            return
        for stale in Path(self.build_lib).rglob("*.cpython-*.so"):  # of an earlier build: its source may differ
            stale.unlink()
        try:
            self._compile()
        except (CompileError, ImportError, LinkError) as error:
            if wanted:
                raise
            warnings.warn(f"modules are not compiled, and run as Python: {error}", stacklevel=1)

    def _compile(self) -> None:
        """All of them or none: a module that has no library cannot be imported."""
        from mypyc.build import mypycify

        modules = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["ryzanstein"]["compiled"]
        with tempfile.TemporaryDirectory() as built:
            # Strict types are lint's; here the packages whose types they need may be missing.
            extensions = mypycify(
                ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent", *modules],
                debug_level="0",
                group_name="ryzanstein",
                target_dir=f"{self.build_temp}/mypyc",
            )
            command = build_ext(Distribution({"name": "ryzanstein", "ext_modules": extensions}))
            command.build_lib, command.build_temp = built, self.build_temp
            command.ensure_finalized()
            command.run()
            shutil.copytree(built, self.build_lib, dirs_exist_ok=True)


setup(cmdclass={"build_ext": BuildExtensions})
