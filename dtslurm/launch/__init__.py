"""Launchers, one module each: the command that starts the ranks of a job."""
