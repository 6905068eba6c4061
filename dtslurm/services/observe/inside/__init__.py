"""What a user does inside a running job: commands, profiles, ports, notebooks and editors."""
