"""Container runtimes, one module each: how a task starts inside an image."""
