"""Heartbeats of large jobs, sent over TCP through a tree of node agents to the supervisor."""
