"""The logs of a run, followed over one connection."""
