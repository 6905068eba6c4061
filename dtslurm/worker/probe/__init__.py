"""Looks at a node from inside, and at the network between two."""
