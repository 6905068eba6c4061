"""Follows the log files of a run and sends what is new as frames."""
