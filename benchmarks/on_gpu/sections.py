"""The sections, the most valuable first: what a budget that runs out loses is at the end."""

from benchmarks.on_gpu.budget import Section

HERE = "benchmarks.on_gpu"
SECTIONS = (
    Section("machine", "what the machine gives", 75, 20, f"{HERE}.machine:run"),
    Section("correctness", "whether what models compute is right", 100, 40, f"{HERE}.correctness:models"),
    Section("decode", "decode, 8B, bf16 weights", 120, 45, f"{HERE}.decode:bf16_8b"),
    Section("prefill", "prefill, 8B", 60, 30, f"{HERE}.prefill:run"),
    Section("overhead", "what a served step costs besides", 80, 35, f"{HERE}.overhead:run"),
    Section("transformers", "against transformers", 90, 40, f"{HERE}.against_transformers:run"),
    Section("loading", "loading, 13B", 75, 45, f"{HERE}.partners:loading"),
    Section("decode-fp8", "decode, 8B, fp8 and int8 weights", 90, 35, f"{HERE}.decode:coded_8b"),
    Section("kernels", "whether each kernel is right", 80, 30, f"{HERE}.correctness:kernels"),
    Section("attention", "attention alone", 45, 25, f"{HERE}.partners:attention"),
    Section("graphs", "graphs against eager launches", 40, 25, f"{HERE}.partners:graphs"),
    Section("decode-13b", "decode, 13B", 80, 35, f"{HERE}.decode:all_13b"),
    Section("collectives", "sums over ranks", 40, 25, f"{HERE}.partners:collectives"),
)
"""What may fail for good (a wrong address in one kernel ends all work of its process on the GPU) has a section of its
own."""
