"""The ``dtslurm`` command: one file per verb; each parses, calls one service and prints."""
