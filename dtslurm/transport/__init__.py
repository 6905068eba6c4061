"""Run commands and transfer bytes, locally or on a login node. All processes of dtslurm start here."""
