"""YAML files to values: profiles and project files, validated with every problem reported at once."""
