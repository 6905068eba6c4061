"""Checks of a request that need only its own values; a layer of pure functions below the services."""
