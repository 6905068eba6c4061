"""Location of ``templates/`` and ``cluster_profiles/`` in wheel, editable and sdist installs."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def root() -> Path:
    """Return the folder that contains the packaged ``templates`` and ``cluster_profiles``.

    In a wheel this is ``dtslurm/_data``, in a checkout the folder that contains the package.
    """
    packaged = _PACKAGE / "_data"
    return packaged if packaged.is_dir() else _PACKAGE.parent


def templates() -> Path:
    """Return the folder of the packaged script templates."""
    return root() / "templates"


def cluster_profiles() -> Path:
    """Return the folder of the packaged cluster profiles."""
    return root() / "cluster_profiles"


def packaged_here(profile: Path) -> Path:
    """Return this installation's copy of a profile that another installation of dtslurm packages.

    Any other profile is returned unchanged. After an upgrade into a new environment, records of runs still
    name profiles of the old installation.
    """
    folder = profile.parent
    if folder.name != "cluster_profiles" or folder == cluster_profiles():
        return profile
    other_package = folder.parents[1] if folder.parent.name == "_data" else folder.parent / "dtslurm"
    own_copy = cluster_profiles() / profile.name
    return own_copy if (other_package / "assets.py").is_file() and own_copy.is_file() else profile


def worker(name: str) -> Path:
    """Return the path of a standard-library-only program of ``dtslurm/worker``, to be run or copied."""
    return _PACKAGE / "worker" / name
