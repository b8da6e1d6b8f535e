"""The command `ryzanstein`: the local stack and the operator's commands."""
