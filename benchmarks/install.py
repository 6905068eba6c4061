"""The disk space and the number of files of an installation, beside other tools.

Each tool is installed in a separate environment with all its dependencies and with compiled bytecode, but
without pip and torch. The number of files matters because quotas of home directories on login nodes limit
files as well as bytes.

Run it with ``python -m benchmarks.install``.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.charts import Bar, Chart, print_charts
from benchmarks.peers import NAMES, PeerMissing, environment, version


def measure_size(folder: Path) -> tuple[float, int, int]:
    """Return the size in MB, the number of files and the number of packages of an environment."""
    files = [path for path in (folder / "lib").rglob("*") if path.is_file() and not path.is_symlink()]
    packages = {path for path in (folder / "lib").rglob("*.dist-info") if path.is_dir()}
    return sum(path.stat().st_size for path in files) / 1e6, len(files), len(packages)


def main() -> None:
    """Measure and print."""
    sizes: dict[str, tuple[float, int, int]] = {}
    failed: dict[str, str] = {}
    for name in NAMES:
        try:
            sizes[name] = measure_size(environment(name))
        except PeerMissing as error:
            failed[name] = str(error)
    charts = []
    for column, (title, unit) in enumerate(
        (("Size of an installation", "MB"), ("Files of an installation", "files"))
    ):
        bars = [
            Bar(f"{name} {version(name)}", None, note=failed[name])
            if name in failed
            else Bar(
                f"{name} {version(name)}",
                value := float(sizes[name][column]),
                value,
                value,
                ratio := value / sizes["dtslurm"][column],
                ratio,
                ratio,
                note=f"{sizes[name][2]} packages",
            )
            for name in NAMES
        ]
        charts.append(Chart(title, unit, "dtslurm", tuple(bars)))
    print_charts(charts)


if __name__ == "__main__":
    main()
