"""Probes of a node's hardware and software, and of the network between two nodes."""
