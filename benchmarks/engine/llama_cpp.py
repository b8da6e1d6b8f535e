"""llama.cpp's own times for the steps that `benchmarks.engine.floors` measures, by its `llama-batched-bench`.

A checkpoint becomes a GGUF file by llama.cpp's converter, in bf16 as it is, so both multiply the same numbers of bits.
What is given is llama.cpp's source directory, built with cmake in `build/`:

    cmake -B build -DBUILD_SHARED_LIBS=OFF && cmake --build build --target llama-batched-bench

and of `benchmarks.engine.speculation` also `--target llama-speculative-simple`.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import BenchError
from benchmarks.random_model import TOKENIZER

_CONVERTER, _BENCH = "convert_hf_to_gguf.py", "build/bin/llama-batched-bench"
_SPECULATIVE = "build/bin/llama-speculative-simple"
_SPEED = re.compile(r"decoded\s+\d+ tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+) t/s")
_TOKENS = 16  # that are generated for the time of a decode step


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp as it lies in `source`, with the tokenizer of the model directory `tokenizer`: its converter takes no
    model without one."""

    source: Path
    tokenizer: Path

    def __post_init__(self) -> None:
        if missing := [name for name in (_CONVERTER, _BENCH) if not (self.source / name).is_file()]:
            raise BenchError(f"{self.source} holds no {missing[0]}: give llama.cpp's source, built in build/.")
        if not (self.tokenizer / "tokenizer.json").is_file():
            raise BenchError(f"{self.tokenizer} holds no tokenizer.json: give a model directory.")

    def convert(self, model: Path) -> Path:
        """A GGUF file beside the checkpoint in `model`. Raises BenchError where llama.cpp does not know the
        architecture."""
        for name in TOKENIZER if model.resolve() != self.tokenizer.resolve() else ():
            if (self.tokenizer / name).is_file():
                shutil.copyfile(self.tokenizer / name, model / name)
        model_type = json.loads((model / "config.json").read_bytes())["model_type"]
        if model_type.startswith("gemma"):
            _fall_back_to_bytes(model / "tokenizer.json")
        file = model / "model.gguf"
        command = [sys.executable, str(self.source / _CONVERTER), str(model), "--outtype", "bf16"]
        without_heads = ["--no-mtp"] if model_type.startswith("qwen3_5") else []
        _run([*command, *without_heads, "--outfile", str(file)])
        return file

    def decode_ms(self, file: Path, sequences: int, context: int, threads: int) -> float:
        """Of a step that computes a token of each of `sequences`, behind `context` tokens that they share."""
        (row,) = self._measure(file, threads, context, _TOKENS, sequences)
        return 1e3 * row["t_tg"] / _TOKENS

    def prefill_ms(self, file: Path, tokens: int, threads: int) -> float:
        """Of a prompt of `tokens`."""
        (row,) = self._measure(file, threads, tokens, 1, 1)
        return 1e3 * row["t_pp"]

    def speculation(self, model: Path, draft: Path, prompt: str, tokens: int, threads: int) -> dict[str, float]:
        """Tokens per second behind `prompt`, greedily, without speculation and with the draft model."""
        files = [self.convert(directory) for directory in (model, draft)]
        command = [str(self.source / _SPECULATIVE), "-m", str(files[0]), "-md", str(files[1]), "-p", prompt]
        command += ["-n", str(tokens), "--temp", "0", "-t", str(threads), "-td", str(threads)]
        command += ["--spec-type", "draft-simple"]
        found = _SPEED.findall(_run(command, errors=True))
        if len(found) != 1:
            raise BenchError(f"{_SPECULATIVE} printed no speed; is it of another version of llama.cpp?")
        plain = 1e3 / self.decode_ms(files[0], 1, 64, threads)
        return {"none": plain, "draft model": float(found[0])}

    def _measure(
        self, file: Path, threads: int, prompt: int, generated: int, sequences: int
    ) -> Sequence[dict[str, float]]:
        tokens = str(prompt + sequences * (generated + 1))
        command = [str(self.source / _BENCH), "-m", str(file), "-t", str(threads), "-tb", str(threads), "-pps"]
        command += ["-npp", str(prompt), "-ntg", str(generated), "-npl", str(sequences), "-kvu", "-c", tokens]
        printed = _run([*command, "-ub", "512", "--output-format", "jsonl"])
        rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        if len(rows) != 1:
            raise BenchError(f"{_BENCH} printed {len(rows)} results instead of one: {printed[-300:]}")
        return rows


def _fall_back_to_bytes(file: Path) -> None:
    """Makes `tokenizer.json` of the one form that the converter takes for a Gemma."""
    tokenizer = json.loads(file.read_bytes())
    tokenizer["model"]["byte_fallback"] = True
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"]]}
    file.write_text(json.dumps(tokenizer))


def _run(command: Sequence[str], *, errors: bool = False) -> str:
    """What it prints; `errors`: its log too."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise BenchError(f"{Path(command[0]).name} ended with {done.returncode}: {' '.join(last)[:300]}")
    return done.stdout + (done.stderr if errors else "")
