"""From what a cluster tells of itself to a profile."""
