"""Download, register and export the files of a run."""
