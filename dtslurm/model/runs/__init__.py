"""What is known of runs: their record, states, telemetry, verdicts and usage."""
