"""A command line whose active environment holds a framework, on the suite's real Slurm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.lab.cluster import SlurmLab

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
Activated = Callable[[Path], Cli]


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave these tests out unless they are named or asked for: they install gigabytes."""
    paths = [Path(word.partition("::")[0]).absolute() for word in config.args]
    named = any(path == HERE or HERE in path.parents for path in paths)
    if named or config.option.frameworks or "frameworks" in config.option.markexpr:
        return
    left = [item for item in items if HERE in item.path.parents]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture
def activated(slurm_lab: SlurmLab, tmp_path: Path) -> Iterator[Activated]:
    """Return the command line of somebody who has activated the environment of that Python."""
    folder = tmp_path / "project"
    folder.mkdir()
    tools = []

    def activate(python: Path) -> Cli:
        env = {**slurm_lab.env, "DTSLURM_RUN_ROOT": str(tmp_path / "runs")}
        tool = Cli("slurm", folder, {**env, "VIRTUAL_ENV": str(python.parent.parent)})
        tools.append(tool)
        return tool

    yield activate
    for tool in tools:
        for job in tool.started:
            tool("cancel", job, code=None)
