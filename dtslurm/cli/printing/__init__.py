"""The output of commands: tables, verdicts, progress, JSON."""
