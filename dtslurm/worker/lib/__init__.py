"""Code shared by the worker programs: files and their errors, answers, the bad-node list."""
