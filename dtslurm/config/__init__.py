"""YAML files as validated values: cluster profiles, project files, job files and packaged data."""
