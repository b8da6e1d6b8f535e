"""Chat completions that were made with `store: true`: kept, listed, changed and deleted as OpenAI has it."""
