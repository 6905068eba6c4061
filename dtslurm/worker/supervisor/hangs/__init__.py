"""Tells whether ranks that write nothing still work."""
