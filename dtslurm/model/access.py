"""The connection settings of a cluster, the only part of its profile that most commands need."""

from __future__ import annotations

from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Access:
    """The connection settings of a `ClusterProfile`, sufficient to list one's jobs.

    Attributes:
        name: the profile's name.
        scheduler: ``slurm`` or ``local``.
        host, user, python, transport: as in `Login`.
        recognise: as in `ClusterProfile`.
        min_poll_s: as in `SlurmCustoms`.
    """

    name: str
    scheduler: str = "slurm"
    host: str | None = None
    user: str | None = None
    python: str | None = None
    transport: str = "auto"
    recognise: tuple[str, ...] = ()
    min_poll_s: float = 30.0
