"""Fine-tuning jobs: their states, the check of their files, and what is published of them."""
