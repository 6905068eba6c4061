"""Relays TCP connections between a client and a node of a running job, over one pair of pipes."""
