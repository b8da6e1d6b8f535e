"""Files of fine-tuning jobs: what a line may be, and what a model learns from it."""
