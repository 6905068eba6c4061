"""The run directories, which are authoritative, and an index of runs that can be rebuilt from them."""
