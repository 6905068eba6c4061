"""Release tests: builds, installations in clean environments, and dependencies."""
