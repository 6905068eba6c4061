"""Hydra's launcher ``dtslurm``: ``python train.py -m hydra/launcher=dtslurm lr=1e-4,3e-4``.

Hydra looks for plugins below ``hydra_plugins`` only. It needs hydra-submitit-launcher, which it extends.
"""

from importlib.util import find_spec

if find_spec("hydra_plugins.hydra_submitit_launcher"):
    from hydra_plugins.hydra_dtslurm_launcher.launcher import DtslurmLauncher

    __all__ = ["DtslurmLauncher"]
