"""Code shared by the worker programs: JSON records, locks, file errors, answers, the bad-node list."""
