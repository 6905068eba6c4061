"""Hydra's own tests of a launcher, on ``hydra/launcher=dtslurm``."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf  # type: ignore[import-untyped]

from hydra_plugins.hydra_dtslurm_launcher.launcher import DtslurmQueueConf  # type: ignore[import-untyped]
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
LOCAL = ["hydra.launcher.cluster=local", "hydra.launcher.timeout_min=5"]


@pytest.fixture(autouse=True)
def run_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTSLURM_RUN_ROOT", str(tmp_path / "runs"))


@pytest.mark.sampled(4, "launchers")
@pytest.mark.parametrize(("launcher_name", "overrides"), [("dtslurm", LOCAL)])
class TestLauncher(LauncherTestSuite):
    """A sweep in all its forms."""


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [
        (
            {},
            [
                *("-m", "hydra/hydra_logging=disabled", "hydra/job_logging=disabled"),
                *("hydra/launcher=dtslurm", *LOCAL),
            ],
        )
    ],
)
@pytest.mark.sampled(4, "programs")
class TestIntegration(IntegrationTestSuite):
    """Programs of their own."""


def test_hydra_launcher_has_every_submitit_slurm_key() -> None:
    theirs = {*SlurmQueueConf.__dataclass_fields__, "wait_for_completion"}  # the last is of the main branch
    assert theirs <= set(DtslurmQueueConf.__dataclass_fields__)
    same = ("signal_delay_s", "max_num_timeout", "array_parallelism", "timeout_min", "stderr_to_stdout")
    assert {name: getattr(DtslurmQueueConf, name) for name in same} == {
        name: getattr(SlurmQueueConf, name) for name in same
    }
    assert ConfigStore.instance().load("hydra/launcher/dtslurm.yaml").node.wait_for_completion is True


def test_unawaited_hydra_sweep_returns_at_once(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        textwrap.dedent(
            """
            import time
            from pathlib import Path

            import hydra

            @hydra.main(version_base=None, config_path=None)
            def main(config):
                while not Path(config.go).exists():
                    time.sleep(0.1)
                Path(config.go).with_name(f"ended-{config.number}").touch()

            main()
            """
        )
    )
    go = tmp_path / "go"
    words = ["-m", "hydra/launcher=dtslurm", *LOCAL, "hydra.launcher.wait_for_completion=false"]
    argv = [sys.executable, "app.py", *words, "hydra.sweep.dir=sweep", f"+go={go}", "+number=1,2"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    go.touch()
    wait_until(lambda: all((tmp_path / f"ended-{number}").exists() for number in (1, 2)), "both jobs' end")
