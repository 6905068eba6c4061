"""dtslurm: from a training script to a correct, fast, fault-tolerant run on any Slurm cluster."""

__version__ = "0.1.0.dev0"
