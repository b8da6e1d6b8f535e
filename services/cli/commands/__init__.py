"""The commands of `ryzanstein`: a module or folder for each group that `services/cli/groups.py` lists."""
