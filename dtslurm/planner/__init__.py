"""How a model fits a cluster: memory and time of a training step under every parallel layout. Pure maths."""
