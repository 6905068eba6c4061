"""Looks at one node before training: what it has, and whether that works.

Started on every node by the supervisor, beside whose files it lies. Stdlib only, Python >= 3.6.
"""
