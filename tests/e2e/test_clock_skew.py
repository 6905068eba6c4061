"""A job on a node whose clock differs from the controller's: a library shifts the clock of all its processes.

Files keep the true times, and so does Slurm's own daemon of the node.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import ON_SLURM, Cli, events_of
from tests.preload import skew_clock

TRAIN = """
    import os, pathlib, time
    folder = pathlib.Path(os.environ["DTSLURM_RUN_DIR"])
    print("the clock says", time.time(), flush=True)
    step = 0
    while os.environ["DTSLURM_ATTEMPT"] == "0" and not (folder / "go").exists():
        step += 1
        with open(os.environ["DTSLURM_METRICS"], "a") as file:
            file.write('{"step": %d}\\n' % step)
        time.sleep(0.5)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library that shifts a clock is."""
    return tmp_path_factory.mktemp("skew")


def on_skewed_node(folder: Path, seconds: int) -> list[str]:
    """Return the options of a job whose processes have a clock that is ahead by so many seconds."""
    variables = skew_clock(seconds, folder).items()
    return [word for name, value in variables for word in ("--env", f"{name}={value}")]


@ON_SLURM
@pytest.mark.parametrize("seconds", [-50, 100])
def test_f66_wrong_node_clock_does_not_shift_the_time_limit(cli: Cli, folder: Path, seconds: int) -> None:
    options = ("-l", "single", "-t", "1", "--total-time", "1h", "--hang-timeout", "off")
    job = cli.submit(*options, *on_skewed_node(folder, seconds), cli.script(TRAIN))
    run = cli.run_dir(job)
    cli.wait_until(lambda: events_of(run, "attempt_ended"), 150)
    [begun], [ended] = events_of(run, "attempt"), events_of(run, "attempt_ended")
    assert ended["cause"] == "time-limit"
    started_at = float(str(events_of(run, "started")[0]["time"]))
    ended_at = begun["slurm_time"] + ended["time"] - begun["time"]
    assert 20 < ended_at - started_at < 58  # of 60 s, 30 are for the requeue
    assert cli.wait_for_end(job, 240)["statuses"][0]["state"] == "COMPLETED"
    assert [event["cause"] for event in events_of(run, "attempt_ended")] == ["time-limit", "done"]


@ON_SLURM
def test_f66_health_check_reports_a_clock_that_differs_from_the_controller(cli: Cli, folder: Path) -> None:
    options = ("-l", "single", "--max-restarts", "1")
    job = cli.submit(*options, *on_skewed_node(folder, -50), cli.script("print('done')"))
    assert cli.wait_for_end(job)["statuses"][0]["state"] == "COMPLETED"
    [health] = events_of(cli.run_dir(job), "health")
    [finding] = [finding for finding in health["findings"] if finding["check"] == "clock"]
    assert finding["level"] == "warn"
    assert "behind the controller's" in json.dumps(finding)
