"""Fine-tuning: a process that trains LoRA factors over frozen, packed weights."""
