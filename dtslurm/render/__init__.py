"""(spec, profile, launcher) to the text of an sbatch script. Nothing else makes scripts."""
