"""One small file per container runtime: how a task enters the image."""
