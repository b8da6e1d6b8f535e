"""What every layer of the executor uses: settings, the step plan, and what a step is asked for and gives."""
