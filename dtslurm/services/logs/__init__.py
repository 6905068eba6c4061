"""Read and follow the logs of a run over one connection."""
