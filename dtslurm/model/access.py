"""How a cluster is reached and asked: all that most commands need of its profile."""

from __future__ import annotations

from dtslurm.model.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Access:
    """A few values of a `ClusterProfile`, which has many more than a look at one's jobs needs.

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
