"""One small file per launcher: which command starts the ranks, and how."""
