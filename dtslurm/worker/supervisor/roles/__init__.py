"""Roles beside the training of a job, such as servers, which the supervisor starts and keeps alive."""
