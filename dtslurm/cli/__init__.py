"""The ``dtslurm`` command: one module per subcommand, which parses options, calls one service and prints."""
