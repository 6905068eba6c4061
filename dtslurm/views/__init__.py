"""View models for dashboards and reports, built by pure functions; a layer below the services."""
