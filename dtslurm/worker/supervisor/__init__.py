"""Keeps a run going inside its batch job: runs attempts, and chooses the next action by the cause of an end.

Copied into the run directory and started by the batch script. Stdlib only, Python >= 3.6.
"""
