"""What the ranks of a run left behind in logs and files, searched where it lies."""
