"""Programs for run directories: install runs and their code, send files back, and free disk space."""
