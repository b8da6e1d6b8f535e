"""Runs of many seeds; what fails is made short, told and kept."""
