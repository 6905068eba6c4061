"""Samples, metrics and first failures of a run, read where they lie."""
