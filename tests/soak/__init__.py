"""Hours of cluster life in minutes, and a look at what is left of it: ``make soak``."""
