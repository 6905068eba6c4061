"""Texts for users that command line, dashboard, reports and messages share. Pure functions."""
