"""Samples, metrics and first failures of a run, read on the machine that holds them."""
