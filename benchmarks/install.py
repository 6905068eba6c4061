"""How much an installation puts on the disk, beside the tools next door.

``python -m benchmarks.install``: packages with all they depend on, compiled, without pip and torch. A quota
on a login node's home counts files as well as bytes.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.figures import Bar, Chart, show
from benchmarks.peers import NAMES, PeerMissing, environment, version


def size(folder: Path) -> tuple[float, int, int]:
    """Return MB, files and packages of an environment."""
    files = [path for path in (folder / "lib").rglob("*") if path.is_file() and not path.is_symlink()]
    packages = {path for path in (folder / "lib").rglob("*.dist-info") if path.is_dir()}
    return sum(path.stat().st_size for path in files) / 1e6, len(files), len(packages)


def main() -> None:
    """Measure and print."""
    found: dict[str, tuple[float, int, int]] = {}
    failed: dict[str, str] = {}
    for name in NAMES:
        try:
            found[name] = size(environment(name))
        except PeerMissing as error:
            failed[name] = str(error)
    charts = []
    for column, (title, unit) in enumerate((("Size on the disk", "MB"), ("Files", "files"))):
        bars = [
            Bar(f"{name} {version(name)}", None, note=failed[name])
            if name in failed
            else Bar(
                f"{name} {version(name)}",
                value := float(found[name][column]),
                value,
                value,
                ratio := value / found["dtslurm"][column],
                ratio,
                ratio,
                note=f"{found[name][2]} packages",
            )
            for name in NAMES
        ]
        charts.append(Chart(title, unit, "dtslurm", tuple(bars)))
    show(charts)


if __name__ == "__main__":
    main()
