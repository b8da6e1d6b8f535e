"""Names by Prometheus' conventions."""

import re

from tests.monitoring.catalogue import Entry, catalogue

ENTRIES = [entry for entries in catalogue().values() for entry in entries]
OURS = [entry for entry in ENTRIES if entry.name.startswith("ryzanstein_")]
UNITS = ("seconds", "bytes", "ratio")
NOT_BASE = re.compile(r"_(ms|us|ns|milliseconds|microseconds|minutes|hours|kb|mb|gb|kilobytes|megabytes|percent)(_|$)")


def test_every_metric_is_ours_vllms_or_the_processs() -> None:
    prefixes = ("ryzanstein_", "vllm:", "process_")
    assert [entry.name for entry in ENTRIES if not entry.name.startswith(prefixes)] == []


def faults(entry: Entry) -> list[str]:
    """What the conventions say against a name (prometheus.io/docs/practices/naming)."""
    rules = {
        "a counter ends with _total": (entry.type == "counter") == entry.name.endswith("_total"),
        "small letters, digits and underscores": re.fullmatch(r"[a-z][a-z0-9_]*", entry.name) is not None,
        "base units": NOT_BASE.search(entry.name) is None,
        "what it measures is said": len(entry.meaning) > 10 and entry.meaning.endswith("."),
        "its type is not in its name": not re.search(r"(counter|gauge|histogram)", entry.name),
        "its labels are not in its name": not any(f"_by_{label}" in entry.name for label in entry.labels),
        "histograms of time are in seconds": entry.type != "histogram" or entry.name.endswith((*UNITS, "_size")),
        "no label that Prometheus sets": not {"job", "instance", "le", "quantile"} & set(entry.labels),
    }
    return [rule for rule, holds in rules.items() if not holds]


def test_names_follow_the_conventions() -> None:
    assert {entry.name: found for entry in OURS if (found := faults(entry))} == {}


def test_the_rules_find_what_breaks_them() -> None:
    bad = Entry("ryzanstein_step_ms", "counter", ("le",), "Time")
    assert faults(bad) == [
        "a counter ends with _total",
        "base units",
        "what it measures is said",
        "no label that Prometheus sets",
    ]


# How names of metrics begin that are of an executor, and of none of its groups.
OF_THE_HOST = ("groups", "host_", "model_load", "models_sleeping", "training")


def test_every_metric_of_a_group_names_it_and_its_model() -> None:
    prefix = "ryzanstein_executor_"
    names = {entry.name: set(entry.labels) for entry in catalogue()["executor"] if entry.name.startswith(prefix)}
    host = {name for name in names if name.removeprefix(prefix).startswith(OF_THE_HOST)}
    assert len(host) == 13
    for name in names.keys() - host:
        assert {"group", "model"} <= names[name], name


WANTED_BY_OTHERS = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_success_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
}


def test_vllms_names_are_there_with_its_label() -> None:
    aliases = {entry.name: entry for entry in ENTRIES if entry.name.startswith("vllm:")}
    assert aliases.keys() == WANTED_BY_OTHERS
    known = {entry.name for entry in OURS}
    for entry in aliases.values():
        assert "model_name" in entry.labels
        assert entry.alias_of in known
    assert "finished_reason" in aliases["vllm:request_success_total"].labels
