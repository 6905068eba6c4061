"""Keeps a run going inside its batch job: runs attempts, and decides by the cause of an end what comes next.

Copied into the run directory and started by the batch script. Stdlib only, Python >= 3.6.
"""
