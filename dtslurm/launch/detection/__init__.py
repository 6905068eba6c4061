"""Detection of the launcher that a training script needs, from the script's source text alone."""
