"""Values that describe runs: records, states, telemetry, diagnoses and usage."""
