"""What others build on, as lists in the tree (recorded/): a change shows as a difference in the commit that makes it.

`python -m tests.interfaces` prints what has changed, `--record` writes the lists anew. docs/compatibility.md says what
of it holds for how long.
"""
