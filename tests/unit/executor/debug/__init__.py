"""Tests of what looks into rings."""
