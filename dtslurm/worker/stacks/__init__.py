"""Python stacks of running processes, read from outside the processes."""
