"""Checks one node before training: its hardware, and whether it works.

Installed beside the files of the supervisor, which starts it on every node. Stdlib only, Python >= 3.6.
"""
