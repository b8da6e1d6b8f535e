"""The sections, the most valuable first, and how the time of a run is divided among them. Pure.

    budget   | section 1 (at most `most`) | section 2 | ... | kept for those that follow: `least` each | end |

A section may take what is left, less what those after it need at least, and never more than its own `most`.
Time that a section leaves goes to those after it. Where not even `least` is left, it is skipped. Neighbours that
measure no time run beside each other, and need as much as the longest of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

END = 6.0  # seconds kept for ending processes, and for the table


@dataclass(frozen=True)
class Section:
    """One process: what it measures, and how long it may take."""

    name: str
    title: str
    most: float  # seconds after which it is ended
    least: float  # seconds without which it is not worth starting: imports, compilation and a first figure
    code: str = ""  # `module:function`, given a `Bench`
    beside: bool = False  # it measures no time: it may run while its neighbours do that measure none either


def together(sections: Iterable[Section]) -> list[list[Section]]:
    """The sections in their order, those that run beside each other in one list."""
    found: list[list[Section]] = []
    for beside, group in groupby(sections, lambda section: section.beside):
        members = list(group)
        found += [members] if beside else [[section] for section in members]
    return found


def allot(section: Section, later: Sequence[Section], left: float) -> float | None:
    """Seconds for `section` with `left` left of the budget and `later` still to come, none of which runs beside it;
    None: it does not fit."""
    usable = left - END
    if usable < section.least:
        return None
    kept = sum(max(other.least for other in group) for group in together(later))
    return min(section.most, max(section.least, usable - kept))


def soft_limit(seconds: float) -> float:
    """When a section that is ended after `seconds` stops beginning new cases on its own."""
    return max(seconds - 10.0, 0.8 * seconds)


HERE = "benchmarks.on_gpu"
MACHINE = Section("machine", "what the machine gives", 75, 20, f"{HERE}.machine:run")
CORRECTNESS = (
    Section("correctness", "whether what models compute is right", 100, 40, f"{HERE}.correctness:models", beside=True),
    Section("kernels", "whether attention is right", 100, 40, f"{HERE}.correctness:kernels", beside=True),
    Section("parts", "whether each other part is right", 100, 40, f"{HERE}.part_cases:run", beside=True),
)
PRODUCTS = Section("products", "products with quantized weights", 50, 25, f"{HERE}.product_speed:run")
# What may fail for good (a wrong address in one kernel ends all work of its process on the GPU) has a section of its
# own.
SECTIONS = (
    MACHINE,
    *CORRECTNESS,
    Section("decode", "decode, 8B, bf16 weights", 120, 45, f"{HERE}.throughput:bf16_8b"),
    Section("prefill", "prefill, 8B", 60, 30, f"{HERE}.throughput:prefill"),
    Section("overhead", "what a served step costs besides", 80, 35, f"{HERE}.overhead:overhead"),
    Section("loading", "loading, 13B", 75, 45, f"{HERE}.loading_speed:run"),
    Section("decode-fp8", "decode, 8B, quantized weights", 110, 35, f"{HERE}.throughput:coded_8b"),
    PRODUCTS,
    Section("training", "fine-tuning, 7B, base of 4 bits", 60, 30, f"{HERE}.training_speed:run"),
    Section("decode-13b", "decode, 13B", 80, 35, f"{HERE}.throughput:all_13b"),
    Section("sparse", "sparse attention beside dense", 50, 25, f"{HERE}.sparse_speed:run"),
    Section("invariance", "--batch-invariant: is it exact, and what it costs", 60, 25, f"{HERE}.overhead:invariance"),
    Section("collectives", "sums over ranks", 40, 25, f"{HERE}.collective_speed:run"),
)
HEADLINE = Section("headline", "two figures of decode and one of prefill", 70, 25, f"{HERE}.throughput:headline")
# A first look at a machine, in some three minutes: whether everything is right, and the figures that matter most.
QUICK = (MACHINE, *CORRECTNESS, HEADLINE, PRODUCTS)


def section_of(name: str) -> Section:
    """Raises `KeyError`."""
    return {section.name: section for section in (*SECTIONS, HEADLINE)}[name]


def chosen(names: Sequence[str], *, quick: bool = False) -> list[Section]:
    """The sections of those names, in their usual order; of no names: all, or those of a quick run. Raises `KeyError`
    with the names that no section has."""
    known = [*SECTIONS, HEADLINE]
    unknown = sorted(set(names) - {section.name for section in known})
    if unknown:
        raise KeyError(*unknown)
    if not names:
        return list(QUICK if quick else SECTIONS)
    return [section for section in known if section.name in names]
