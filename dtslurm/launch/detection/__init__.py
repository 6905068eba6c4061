"""Which launcher a training script wants, read from its text; it is never run."""
