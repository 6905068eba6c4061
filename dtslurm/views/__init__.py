"""The data behind a screen, made of values alone. Pure functions below the services."""
