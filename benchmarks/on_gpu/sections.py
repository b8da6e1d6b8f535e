"""The sections, the most valuable first: what a budget that runs out loses is at the end."""

from benchmarks.on_gpu.budget import Section

HERE = "benchmarks.on_gpu"
SECTIONS = (
    Section("machine", "what the machine gives", 50, 20, f"{HERE}.machine:run"),
    Section("correctness", "whether what is computed is right", 100, 45, f"{HERE}.correctness:run"),
    Section("decode", "decode, 8B", 110, 45, f"{HERE}.decode:run_8b"),
    Section("prefill", "prefill, 8B", 50, 30, f"{HERE}.prefill:run"),
    Section("overhead", "what a served step costs besides", 70, 35, f"{HERE}.overhead:run"),
    Section("transformers", "against transformers", 90, 40, f"{HERE}.against_transformers:run"),
    Section("loading", "loading, 13B", 75, 45, f"{HERE}.partners:loading"),
    Section("attention", "attention alone", 45, 25, f"{HERE}.partners:attention"),
    Section("graphs", "graphs against eager launches", 40, 25, f"{HERE}.partners:graphs"),
    Section("decode-13b", "decode, 13B", 70, 35, f"{HERE}.decode:run_13b"),
    Section("collectives", "sums over ranks", 40, 25, f"{HERE}.partners:collectives"),
)
