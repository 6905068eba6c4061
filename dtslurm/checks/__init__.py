"""What is wrong with a request, by its own values alone. Pure functions below the services."""
