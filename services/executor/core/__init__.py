"""What every layer of the executor uses: settings, the step plan, the engine's protocol."""
