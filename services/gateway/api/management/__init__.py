"""What may be done to models and LoRA adapters over any API: the rules, and who carries them out."""
