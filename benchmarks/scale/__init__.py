"""How costs grow with a cluster's nodes, a user's jobs and a run's log files."""
