"""Evidence of a run in its logs and files, searched on the machine that holds them."""
