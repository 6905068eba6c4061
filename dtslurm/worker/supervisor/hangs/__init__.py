"""Detects whether ranks that write no output still work."""
