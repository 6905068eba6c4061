"""What the dashboard draws: curves, spark lines and strips over time."""
