"""Roles beside the training of a job: servers and other programs, which the supervisor starts and keeps alive."""
