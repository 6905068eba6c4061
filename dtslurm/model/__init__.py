"""Immutable values that all layers share. This package uses only the standard library."""
