"""docs/metrics.md: every metric there is, read from the services' registries."""

from tests.monitoring.catalogue import Entry, catalogue

_HEAD = """<!-- Printed by `python -m tests.monitoring > docs/metrics.md` -->
# Metrics

Every service answers `/metrics` in Prometheus' format: the gateway on its API port (`RYZANSTEIN_METRICS_NEED_KEY` asks
for an API key), the others on `RYZANSTEIN_OPS_PORT`, as do gateways that
[share a port](operations.md#several-gateways-on-one-port). Figures are those of the moment of the scrape, or of
another one in the second before it, so with a scrape and a refresh every 2 s a dashboard is 5 s behind at most.
[Dashboards](dashboards.md).

```
 client ─▶ gateway ─▶ scheduler: queue, placement ─▶ ring: queue ─▶ prefill ─▶ decode ─▶ gateway: delivery ─▶ client
```

| stage | histogram |
| --- | --- |
| queue | `ryzanstein_scheduler_queue_seconds`, until a ring has accepted the request; then `ryzanstein_executor_queue_seconds`, until it has a place in the batch |
| placement | `ryzanstein_scheduler_decision_seconds`, a part of the scheduler's queue |
| prefill | `ryzanstein_executor_prefill_seconds`, up to the first token |
| decode | `ryzanstein_executor_decode_seconds`, from the first token to the last |
| delivery | `ryzanstein_gateway_delivery_seconds`, per arrival of a stream's tokens |
| all of it | `ryzanstein_gateway_first_token_seconds`, `_between_tokens_seconds`, `_generation_seconds`, as clients feel it |

- **The executor's figures are read from the ring's board** (shared memory) by the supervisor process: a scrape costs
  the ring nothing, and is answered when the leader is hung. They begin at 0 with each life of a ring.
  `communication_seconds_total / step_seconds_total` is the communication share of a step; on GPUs one collective of 17
  is timed, by CUDA events.
- **GPUs** are asked for by NVML (`nvidia-ml-py`) when there are any; parts of a partitioned GPU have memory and no
  utilization.
- **Labels are bounded.** `model` is a model that is or was served, never what a client has made up; of more than 100
  models that requests wait for, the others are `(others)`. `route` is one of the API's paths, or `other`. A group that
  is gone leaves the scheduler's metrics after 300 s, and the health monitor's when it forgets the group.
- **vLLM's names.** Autoscalers and dashboards made for vLLM find `vllm:...` with the label `model_name`, each on the
  service that has the figure: the same samples under another name, renamed at the scrape.
  `sum by (model_name) (vllm:num_requests_waiting)` counts requests in rings and those that schedulers hold, which is
  what to scale by, from zero too. `RYZANSTEIN_METRICS_ALIASES=false` leaves them out.

`promtool check metrics` finds nothing to say about ours (`tests/monitoring`); it takes the colon in vLLM's names for a
fault.
"""

_TITLES = {
    "": "Every service",
    "gateway": "Gateway",
    "scheduler": "Scheduler",
    "health-monitor": "Health monitor",
    "executor": "Executor",
}


def page() -> str:
    parts = [_HEAD]
    aliases: list[tuple[str, Entry]] = []
    for service, entries in catalogue().items():
        own = [entry for entry in entries if not entry.alias_of]
        aliases += [(service, entry) for entry in entries if entry.alias_of]
        rows = [f"| `{e.name}` | {e.type} | {_labels(e)} | {e.meaning} |" for e in own]
        table = ["| name | type | labels | meaning |", "| --- | --- | --- | --- |", *rows]
        parts.append("\n".join([f"## {_TITLES[service]}", *table, ""]))
    rows = [f"| `{e.name}` | {service} | {_labels(e)} | `{e.alias_of}` |" for service, e in aliases]
    table = ["| name | on | labels | the same as |", "| --- | --- | --- | --- |", *rows]
    parts.append("\n".join(["## vLLM's names", *table, ""]))
    return "\n".join(parts)


def _labels(entry: Entry) -> str:
    return ", ".join(f"`{label}`" for label in entry.labels)
