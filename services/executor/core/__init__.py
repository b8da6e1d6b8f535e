"""What every layer of the executor uses: settings, the step plan, what a step is asked for and gives."""
