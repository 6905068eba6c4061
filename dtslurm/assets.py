"""Find ``templates/`` and ``cluster_profiles/`` in wheel, editable and sdist installs."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def root() -> Path:
    """Return the folder that holds the packaged ``templates`` and ``cluster_profiles``.

    A wheel carries them in ``dtslurm/_data``; in a checkout they stand beside the package.
    """
    packaged = _PACKAGE / "_data"
    return packaged if packaged.is_dir() else _PACKAGE.parent


def templates() -> Path:
    """Return the folder of packaged script templates."""
    return root() / "templates"


def cluster_profiles() -> Path:
    """Return the folder of packaged cluster profiles."""
    return root() / "cluster_profiles"


def packaged_here(profile: Path) -> Path:
    """Return our own copy of a profile that another installation of dtslurm packages; any other as it is.

    After an upgrade into a new environment, runs still name profiles of the old one.
    """
    folder = profile.parent
    if folder.name != "cluster_profiles" or folder == cluster_profiles():
        return profile
    package = folder.parents[1] if folder.parent.name == "_data" else folder.parent / "dtslurm"
    ours = cluster_profiles() / profile.name
    return ours if (package / "assets.py").is_file() and ours.is_file() else profile


def worker(name: str) -> Path:
    """Return the path of a stdlib-only program of ``dtslurm/worker``, to be run or copied by path."""
    return _PACKAGE / "worker" / name
