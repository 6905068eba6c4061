"""Python programs on a login node: how they are sent, and what they answer, checked."""
