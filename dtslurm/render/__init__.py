"""Render sbatch scripts from a job spec, a cluster profile and a launcher. No other code renders them."""
