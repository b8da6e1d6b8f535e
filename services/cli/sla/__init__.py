"""The SLA report: how well the service did in a period, from Prometheus or from the recorded journal.

    journal ───▶ ledger ───┐                                             ┌▶ table, markdown
    (NATS)                 ├──▶ scopes (all, each model) ──▶ report ─────┼▶ JSON
    Prometheus ─▶ queries ─┘                                 + targets   └▶ exit code
    (HTTP)

What counts as bad, as down, as repaired: `docs/sla.md`.
"""
