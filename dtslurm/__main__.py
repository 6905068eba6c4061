"""``python -m dtslurm`` is the ``dtslurm`` command."""

from dtslurm.cli.main import main

main()
