"""Which host trains which fine-tuning job, beside the models that it serves."""
