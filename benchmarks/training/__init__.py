"""Fine-tuning beside peft and transformers, and what a job costs those who are served meanwhile."""
