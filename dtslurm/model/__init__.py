"""Frozen values that every layer shares. Standard library only."""
