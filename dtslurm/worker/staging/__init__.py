"""Copy data to the nodes' local disks before training, and results back to the shared file system.

Copied into the run directory and started by the batch script. Stdlib only, Python >= 3.6.
"""
