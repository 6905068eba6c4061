"""From what the user wrote to the values of a job: paths, secrets, environment, code, data."""
