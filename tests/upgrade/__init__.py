"""The previous release beside this one: messages and records that it wrote (test_messages.py), and its processes in one
cluster with ours (test_mixtures.py, which `make test-upgrade` runs).

PREVIOUS names it by its tag or commit. A release that is done makes itself the previous one (docs/releasing.md):
`python -m tests.upgrade --record` writes its messages down as bytes.
"""
