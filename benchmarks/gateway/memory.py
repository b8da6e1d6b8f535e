"""What a gateway holds in memory: `python -m benchmarks.gateway.memory --help`.

Our whole stack on the stub engine, which serves a made-up model with a vocabulary of the size that is asked for; the
gateway's tokenizer and chat template are as for a real one. Measured at rest, under W3, and afterwards.
"""

import asyncio
import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import typer
from tokenizers import pre_tokenizers

from benchmarks.control_plane.systems import HOST, Ours
from benchmarks.errors import BenchError
from benchmarks.harness import JsonFile, Sheet, progress_bars, publish, run
from benchmarks.serve.__main__ import Plan, run_to_end
from benchmarks.serve.workloads import STARTS, WORDS, WORKLOADS

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REST_SECONDS = 3.0
SAMPLE_SECONDS = 0.05
LONGEST_ENTRY = 16


class Held(msgspec.Struct, frozen=True):
    """MiB at one point of the run."""

    when: str
    gateway: float  # resident memory of the gateway's process, shared pages of libraries among it
    anonymous: float  # of it what is its own
    templates: float  # of the process that renders chat templates


def model_directory(directory: Path, vocabulary: int) -> None:
    """Writes what the stub engine and a gateway need of a model with so many tokens: a byte-level BPE whose merges are
    drawn at random, with as many entries and merges as a trained one has."""
    entries, merges = _entries(vocabulary - len(SPECIALS))
    added = []
    for text in SPECIALS:
        entries[text] = len(entries)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": entries[text], "content": text, "special": True, **flags})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "post_processor": None,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": model | {"vocab": entries, "merges": merges},
    }
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary}
    special = {"eos_token": SPECIALS[2], "pad_token": SPECIALS[3], "chat_template": TEMPLATE}
    for name, content in (("tokenizer", tokenizer), ("config", config), ("tokenizer_config", special)):
        (directory / f"{name}.json").write_bytes(msgspec.json.encode(content))


def _entries(count: int) -> tuple[dict[str, int], list[list[str]]]:
    """Vocabulary and merges: the words that prompts are made of (`benchmarks.serve.workloads`), then random ones."""
    generator = random.Random(count)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = {char: index for index, char in enumerate(alphabet)}
    letters = [char for char in alphabet if char.isascii() and char.isalpha()]
    merges: list[list[str]] = []

    def add(left: str, right: str) -> None:
        if left + right not in entries and len(entries) < count:
            entries[left + right] = len(entries)
            merges.append([left, right])

    for word in (*(f"\u0120{word}" for word in WORDS), *STARTS):
        for end in range(1, len(word)):
            add(word[:end], word[end])
    words = [*letters, "\u0120"]
    while len(entries) < count:
        left, right = (generator.choice(words), generator.choice(letters if generator.random() < 0.7 else words))
        if len(left + right) <= LONGEST_ENTRY and left + right not in entries and right[0] != "\u0120":
            add(left, right)
            words.append(left + right)
    return entries, merges


class Watch:
    """Looks at the gateway's memory over and over, in a thread."""

    def __init__(self, processes: Callable[[], Sequence[int]]) -> None:
        """`processes`: the gateway's own process first."""
        self._processes = processes

    def now(self, when: str) -> Held:
        gateway, *others = (psutil.Process(pid) for pid in self._processes())
        whole = gateway.memory_full_info()
        rendering = [each.memory_info().rss for each in others if "template_process" in " ".join(each.cmdline())]
        sizes = (whole.rss, whole.rss - whole.shared, sum(rendering))
        return Held(when, *(round(size / (1 << 20), 1) for size in sizes))

    @contextlib.contextmanager
    def most(self, when: str, found: list[Held]) -> Iterator[None]:
        """Adds to `found` the most that is held meanwhile."""
        over, seen = threading.Event(), [self.now(when)]

        def look() -> None:
            while not over.wait(SAMPLE_SECONDS):
                seen.append(self.now(when))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            found.append(max(seen, key=lambda held: held.gateway))


def measured(vocabulary: int) -> list[Held]:
    """Raises BenchError."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        model_directory(model, vocabulary)
        ours = Ours(Path(folder) / "data", model=model, step_ms=10.0)
        with asyncio.Runner() as runner:
            runner.run(ours.start())
            try:
                return _stages(ours)
            finally:
                runner.run(ours.stop())


def _stages(ours: Ours) -> list[Held]:
    watch = Watch(lambda: ours.processes()["gateway"])
    found: list[Held] = []
    time.sleep(REST_SECONDS)
    found.append(watch.now("at rest"))
    with watch.most("under W3, the most", found):
        _load(ours)
    time.sleep(REST_SECONDS)
    found.append(watch.now("afterwards"))
    return found


def _load(ours: Ours) -> None:
    plan = Plan(f"http://{HOST}:{ours.port}", [WORKLOADS["W3"]], seed=1)
    with progress_bars() as progress:
        report = run_to_end(plan, progress)
    if any(summary.errors for summary in report.summaries):
        raise BenchError("Requests of W3 failed; look at the stack's logs.")


def main(
    vocabulary: Annotated[
        list[int] | None, typer.Option(min=2000, help="Tokens of the model; may be repeated.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Memory of a gateway at rest and under W3. Default: vocabularies of 49,152 and 262,144."""
    found = {size: measured(size) for size in vocabulary or (49_152, 262_144)}
    rows = [
        (f"{size:,}", held.when, *(f"{one:.0f}" for one in (held.gateway, held.anonymous, held.templates)))
        for size, stages in found.items()
        for held in stages
    ]
    head = ("vocabulary", "when", "gateway MiB", "of it its own", "rendering")
    publish(found, Sheet(head, rows, left=("when",)), json=json)


if __name__ == "__main__":
    run(main)
