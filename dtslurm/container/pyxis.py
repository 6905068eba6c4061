"""``pyxis``: srun itself starts the task inside an enroot container."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dtslurm.container.base import Entry, Runtime, pairs
from dtslurm.model.shell import Sh, quote


class Pyxis(Runtime):
    """Options on srun only: as #SBATCH lines they would put the batch script itself into the image."""

    name = "pyxis"
    preparation = "containers/pyxis.sh.j2"

    def srun_options(self, entry: Entry) -> tuple[str, ...]:
        """Return the --container-* options; the variables named win over those set in the image."""
        mounts = quote(",".join(pairs(entry)))
        names = (
            "DTSLURM_RUN_DIR",
            "DTSLURM_ATTEMPT",
            "DTSLURM_CHECKPOINT_DIR",
            "DTSLURM_METRICS",
            *entry.variables,
        )
        image = (f"--container-image={reference(entry)}",) if self._whole(entry) else (_NAME,)
        return (
            *image,
            Sh(f'--container-mounts="$DTSLURM_RUN_DIR:$DTSLURM_RUN_DIR",{mounts}'),
            f"--container-workdir={entry.work_dir}",
            "--no-container-mount-home",
            Sh(f"--container-env={','.join(names)}" + (',"$vendor_set"' if entry.vendor_script else "")),
            *entry.options,
        )

    def values(self, entry: Entry) -> Mapping[str, object]:
        """Return the import step's values: needed where several ranks of a node would import at once."""
        return {
            "image": reference(entry),
            "import_first": not self._whole(entry),
            "nodes": entry.nodes,
            "vendor_script": entry.vendor_script,
        }

    def _whole(self, entry: Entry) -> bool:
        """Whether every task can name the image itself: a file, or one task a node."""
        return entry.is_file or entry.ranks_per_node == 1


_NAME = Sh('--container-name="dtslurm-$SLURM_JOB_ID"')


def reference(entry: Entry) -> str:
    """Return the image as enroot wants it: the registry's host is set off by ``#``."""
    if entry.is_file or "#" in entry.image or "://" in entry.image:
        return entry.image
    host, slash, rest = entry.image.partition("/")
    return f"{host}#{rest}" if slash and re.search(r"[.:]", host) else entry.image


runtime = Pyxis()
