"""Fine-tuning jobs that a host trains, each by a process of its own (ADR 0031)."""
