"""The charts of the dashboard: curves, spark lines and strips over time."""
