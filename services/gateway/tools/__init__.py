"""Tool calls and reasoning: asked for, shown to chat templates, found in the model's text."""
