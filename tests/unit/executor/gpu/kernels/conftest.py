"""Kernels are interpreted at a third of the price."""

from tests.interpreter import make_cheap

make_cheap()
