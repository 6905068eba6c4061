"""Turns the user's request into the values of a job: paths, secrets, environment, code, data."""
