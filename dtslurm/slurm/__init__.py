"""Argument lists for Slurm's commands, and parsers of their output. Nothing is run here."""
