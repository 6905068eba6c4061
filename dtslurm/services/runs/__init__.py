"""Known runs: their state, history and control."""
