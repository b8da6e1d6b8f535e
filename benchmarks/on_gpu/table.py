"""A report as a table for the terminal and for docs/gpu.md, held against the aims, and against what arithmetic predicts
of each optimisation on an H200. Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from msgspec import structs

from benchmarks.harness import Sheet
from benchmarks.on_gpu.bench import Report, Row, shown
from benchmarks.on_gpu.shapes import LLAMA_7B, LLAMA_8B, LLAMA_13B, KvDType, WeightDType
from benchmarks.on_gpu.training_speed import EXAMPLES, GOAL_MINUTES, QLORA

Verdict = Literal["met", "not met", "not measured"]
H200_BANDWIDTH = 4.8e12
"""Bytes/s, as printed on its data sheet."""
H200_BF16 = 7.9e14
"""Operations/s that products of 8192 x 8192 matrices reach; printed are 9.89e14."""


@dataclass(frozen=True)
class Aim:
    """One, and what became of it."""

    what: str
    verdict: Verdict
    found: str


def aims(report: Report) -> list[Aim]:
    """All of them. A dry run has measured none."""
    if report.dry_run:
        report = structs.replace(report, sections=[])
    decode = "decode/8b/bf16/kv-bf16/1024/1"
    return [
        _share("85% of the bandwidth limit at batch 1 (8B, bf16, context 1024)", report.row(decode), 0.85),
        _share(
            "60% of the matrix rate in prefill (8B, bf16, the best chunk)",
            _best(report, "prefill/bf16/"),
            0.6,
        ),
        _kv(report),
        _int4(report),
        _trained(report),
        _loaded(report),
    ]


def _share(what: str, row: Row | None, wanted: float) -> Aim:
    if row is None or row.share is None:
        return Aim(what, "not measured", "")
    return Aim(
        what, "met" if row.share >= wanted else "not met", f"{row.share:.0%}, {shown(row.figure)} {row.unit}"
    )


def _best(report: Report, prefix: str) -> Row | None:
    rows = [row for row in report.rows_under(prefix) if row.share is not None]
    return max(rows, key=lambda row: row.share or 0.0, default=None)


def _kv(report: Report) -> Aim:
    what = "fp8 KV not slower than bf16 KV (8B, bf16 weights)"
    pairs = []
    for row in report.rows_under("decode/8b/bf16/kv-bf16/"):
        other = report.row(row.key.replace("kv-bf16", "kv-fp8"))
        if other is not None and row.figure and other.figure:
            pairs.append((other.figure / row.figure, row.key))
    if not pairs:
        return Aim(what, "not measured", "")
    worst, key = min(pairs)
    case = "context {}, batch {}".format(*key.split("/")[-2:])
    # A hundredth is what two runs of one case differ by.
    return Aim(what, "met" if worst >= 0.99 else "not met", f"at least {worst:.2f} of its tokens/s ({case})")


def _int4(report: Report) -> Aim:
    what = "int4 weights twice as fast as bf16 at batch 1 (8B, context 1024)"
    four, plain = (report.row(f"decode/8b/{weights}/kv-bf16/1024/1") for weights in ("int4", "bf16"))
    if four is None or plain is None or not four.figure or not plain.figure:
        return Aim(what, "not measured", "")
    times = four.figure / plain.figure
    return Aim(what, "met" if times >= 2 else "not met", f"{times:.2f} times")


def _loaded(report: Report) -> Aim:
    what = "13B loaded in under 1 s from page cache"
    row = report.row("loading/load")
    if row is None or row.figure is None:
        return Aim(what, "not measured", "")
    return Aim(what, "met" if row.figure < 1.0 else "not met", f"{row.figure:.2f} s")


def _trained(report: Report) -> Aim:
    what = "QLoRA of a 7B on 10,000 examples of 512 tokens in under an hour, projected"
    row = report.row("training/7b/q4_k/projected")
    if row is None or row.figure is None:
        return Aim(what, "not measured", "")
    return Aim(what, "met" if row.figure < GOAL_MINUTES else "not met", f"{row.figure:.0f} min")


@dataclass(frozen=True)
class Prediction:
    """What one figure should be, with the arithmetic that says so."""

    key: str
    what: str
    predicted: str
    why: str


def predictions() -> list[Prediction]:
    """In the order of the page. Times are floors where they say "at least"."""
    return [*_decode_floors(), *_kv_predictions(), *_other_predictions(), *_training_predictions()]


def _decode_floors() -> list[Prediction]:
    found = []
    for shape in (LLAMA_8B, LLAMA_13B):
        for weights in get_args(WeightDType)[:2]:
            kv: KvDType = "bf16" if shape is LLAMA_8B or weights == "bf16" else "fp8"
            read = shape.decode_bytes(1, 1024, weights, kv)
            seconds = read / H200_BANDWIDTH
            found.append(
                Prediction(
                    f"decode/{shape.name.lower()}/{weights}/kv-{kv}/1024/1",
                    f"decode {shape.name}, {weights} weights, {kv} KV, batch 1, context 1024",
                    f"at most {1 / seconds:.0f} tok/s; the aim is 85%: {0.85 / seconds:.0f}",
                    f"{read / 1e9:.2f} GB / 4.8 TB/s = {seconds * 1e3:.2f} ms",
                )
            )
    return found


def _kv_predictions() -> list[Prediction]:
    found = []
    for kv in get_args(KvDType)[:2]:
        read = LLAMA_8B.decode_bytes(32, 8192, "bf16", kv)
        cache = 32 * 8192 * LLAMA_8B.kv_bytes(kv)
        seconds = read / H200_BANDWIDTH
        found.append(
            Prediction(
                f"decode/8b/bf16/kv-{kv}/8192/32",
                f"decode 8B, bf16 weights, {kv} KV, batch 32, context 8192",
                f"at most {32 / seconds:,.0f} tok/s",
                f"15.01 GB of weights and {cache / 1e9:.1f} GB of KV / 4.8 TB/s = {seconds * 1e3:.1f} ms",
            )
        )
    return found


def _other_predictions() -> list[Prediction]:
    flops = LLAMA_8B.flops(8192)
    seconds = flops / H200_BF16
    held = LLAMA_13B.held_bytes("bf16") / 1e9
    four = LLAMA_8B.decode_bytes(1, 1024, "int4", "bf16")
    return [
        Prediction(
            "decode/8b/int4/kv-bf16/1024/1",
            "decode 8B, int4 weights, bf16 KV, batch 1, context 1024",
            f"at most {H200_BANDWIDTH / four:,.0f} tok/s; 500 to 650",
            f"{four / 1e9:.2f} GB / 4.8 TB/s = {four / H200_BANDWIDTH * 1e3:.2f} ms; but some 5 instructions for each "
            "weight, counted in the kernel's machine code, are two thirds of that rate",
        ),
        Prediction(
            "prefill/bf16/8192/2048",
            "prefill 8B, bf16, prompt 8192 in chunks of 2048",
            f"at most {8192 / seconds:,.0f} tok/s; the aim is 60%: {0.6 * 8192 / seconds:,.0f}",
            f"{flops / 1e12:.0f} Tflop / 790 TFLOP/s = {seconds * 1e3:.0f} ms",
        ),
        Prediction(
            "overhead/eager+no-lookahead/1/greedy",
            "a served step of one 8B sequence, without graphs",
            "4.0 to 5.5 ms",
            "about 300 launches from Python at 8 to 15 us are 2.4 to 4.5 ms, and hide in part behind 3.6 ms of traffic",
        ),
        Prediction(
            "overhead/graphs+no-lookahead/1/greedy",
            "the same with graphs",
            "3.7 to 4.1 ms",
            "one launch; 15.05 GB at 85 to 90% of 4.8 TB/s are 3.5 to 3.7 ms; planning and sampling 0.2 to 0.4 ms",
        ),
        Prediction(
            "overhead/graphs+lookahead/1/greedy",
            "the same with graphs and lookahead",
            "3.5 to 3.8 ms",
            "planning, and the tokens' way to the host and out, happen while the GPU is at work",
        ),
        Prediction(
            "loading/load",
            "13B in bf16 from page cache",
            "0.5 to 1 s",
            f"{held:.1f} GB over PCIe 5.0 at 55 GB/s = {held / 55:.2f} s, if copies into pinned memory keep up",
        ),
        Prediction(
            "transformers/generate/factor",
            "32 prompts of 512 tokens, 128 new: this engine over transformers' generate",
            "4 to 8 times",
            "its decode step launches some 1,000 kernels from Python, 25 to 35 ms; ours is 4 to 5 ms",
        ),
    ]


def _training_predictions() -> list[Prediction]:
    flops, tokens = QLORA.flops(EXAMPLES), EXAMPLES * QLORA.length
    least = flops / H200_BF16
    micro_batches = tokens / 2048
    read = QLORA.weight_traffic(int(micro_batches)) / H200_BANDWIDTH
    what = "QLoRA of a 7B, q4_k, rank 16"
    return [
        Prediction(
            "training/7b/q4_k/projected",
            f"{what}, 10,000 examples of 512 tokens",
            f"at least {least / 60:.1f} min; 8 to 15",
            f"{flops / EXAMPLES / QLORA.length / 1e9:.0f} Gflop a token, {flops / 1e15:.0f} Pflop / 790 TFLOP/s = "
            f"{least:.0f} s; weights unpacked three times in {micro_batches:,.0f} micro batches add "
            f"{read:.0f} s of traffic; some 10,000 launches in each, 8 to 15 us, are 200 to 375 s, and hide in part",
        ),
        Prediction(
            "training/7b/q4_k/memory",
            f"{what}: memory",
            f"{QLORA.held_bytes / 1e9:.1f} to {1.5 * QLORA.held_bytes / 1e9:.0f} GB",
            f"codes {LLAMA_7B.held_bytes('q4_k') / 1e9:.1f} GB; {QLORA.factors / 1e6:.0f} M numbers in factors, 16 "
            "bytes each with gradients and moments; inputs of 32 layers and one layer's activations, of 2,048 tokens",
        ),
    ]


BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
"""Between them stands what `--markdown` makes."""


def parts(report: Report) -> Iterator[Sheet | str]:
    """Everything in one table, then the aims."""
    rows: list[tuple[tuple[str, ...], str | None]] = []
    for section in report.sections:
        ended = f"{section.status}, {section.seconds:.0f} s"
        rows.append(((section.name, "", "", "", ended), "bold"))
        rows += [(cells(row), _style(row)) for row in section.rows]
        if section.status != "done":
            rows.append((("", "", "", "", " ".join(section.error[-1:])), "red"))
    yield Sheet(HEAD, [row for row, _ in rows], left=("note",), styles=[style for _, style in rows])
    for section in report.sections:
        if section.status in ("failed", "timed out"):
            yield "\n  ".join((f"{section.name} {section.status}:", *section.error))
    for aim in aims(report):
        yield f"{aim.verdict}: {aim.what}{': ' + aim.found if aim.found else ''}"


def _style(row: Row) -> str | None:
    if not row.ok:
        return "red"
    return "dim" if row.figure is None else None


HEAD = ("what", "figure", "limit", "share", "note")


def cells(row: Row) -> tuple[str, str, str, str, str]:
    figure = f"{shown(row.figure)} {row.unit}".rstrip() if row.figure is not None else "-"
    share = f"{row.share:.0%}" if row.share is not None else "-"
    note = row.note if row.ok else f"WRONG: {row.note}".rstrip(": ")
    return row.what, figure, shown(row.limit), share, note


# --- docs/gpu.md ---------------------------------------------------------------------------------


def markdown(report: Report | None) -> str:
    """The predictions with what was measured of each, and then every row; without a report: the predictions alone."""
    card = f" ({where(report)})" if report is not None else ""
    rows = [(one.what, one.predicted, one.why, _measured(one, report)) for one in predictions()]
    lines = [BEGIN, _table(("", "predicted", "arithmetic", f"measured{card}"), rows)]
    if report is not None:
        found = [(aim.what, aim.verdict, aim.found or "-") for aim in aims(report)]
        lines += [_table(("aim", "", ""), found), *_all(report)]
    return "\n".join([*lines, END])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] | None = None) -> str:
    safe = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return Sheet(head, safe, left=head if left is None else left).markdown().replace("|  |", "| |")


def _measured(prediction: Prediction, report: Report | None) -> str:
    row = report.row(prediction.key) if report is not None else None
    if row is None:
        return "not yet measured"
    share = f", {row.share:.0%} of the limit" if row.share is not None else ""
    return f"{shown(row.figure)} {row.unit}{share}"


def _all(report: Report) -> Iterator[str]:
    driver, torch, triton = (report.machine.get(name, "unknown") for name in ("driver", "torch", "triton"))
    yield f"All rows of `{report.command}`, {where(report)}, driver {driver}, torch {torch}, Triton {triton}:"
    yield ""
    rows = []
    for section in report.sections:
        for row in section.rows:
            rows.append((*cells(row)[:4], row.note if row.ok else f"**wrong** {row.note}"))
        if section.status != "done":
            rows.append((f"section {section.name}", section.status, "-", "-", " ".join(section.error[-1:])))
    yield _table(HEAD, rows, left=("note",))


def where(report: Report) -> str:
    return f"{report.machine.get('card', 'unknown card')}, {report.date}"


def put_into(page: str, table: str) -> str:
    """`page` with `table` in the place of its figures. Raises ValueError where it has no place for them."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN} and {END}")
    return head + table + tail
