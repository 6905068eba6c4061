"""Options that people write into sbatch scripts, given to dtslurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.e2e.conftest import ON_SLURM, WITHOUT_SSH, Cli


@WITHOUT_SSH
def test_launcher_options_reach_torchrun(cli: Cli) -> None:
    script = cli.script("import os; print('role', os.environ['ROLE_NAME'])")
    options = ("--launcher-option", "role=my trainer", "--launcher-option", "--start-method=fork")
    job = cli.submit("-l", "torchrun", *options, "--python", sys.executable, script)
    assert {status["state"] for status in cli.wait_for_end(job)["statuses"]} == {"COMPLETED"}
    assert "role my trainer" in cli("logs", job).stdout


@WITHOUT_SSH
def test_array_task_id_in_an_argument_is_substituted(cli: Cli) -> None:
    script = cli.script("import sys; print('seed', *sys.argv[1:])")
    job = cli.submit("-l", "single", "--array", "3-4", script, "$SLURM_ARRAY_TASK_ID", "$(id) $HOME")
    cli.wait_for_end(job)
    for task in (3, 4):
        assert f"seed {task} $(id) $HOME\n" in cli("logs", f"{job}_{task}").stdout


@WITHOUT_SSH
def test_script_output_is_copied_to_the_output_files(cli: Cli) -> None:
    script = cli.script("print('trained')")
    copies = ("-o", "logs/%x-%j.out", "--error", "%x.err")
    shell = ("--setup", "echo in the script", "--setup", "echo an error >&2")
    job = cli.submit("-l", "single", "-J", "my job", *copies, *shell, "--teardown", "echo the end", script)
    assert {status["state"] for status in cli.wait_for_end(job)["statuses"]} == {"COMPLETED"}
    run = cli.run_dir(job)
    batch = (run.path / "logs" / "batch.log").read_text()
    output = (cli.folder / "logs" / f"my job-{job}.out").read_text()
    assert (cli.folder / "my job.err").read_text() == "an error\n"
    assert output == f"the logs of the ranks are in {run.path}/logs\nin the script\nthe end\n"
    assert sorted(batch.splitlines()) == sorted([*output.splitlines(), "an error"])


@WITHOUT_SSH
def test_background_program_does_not_delay_the_end_of_the_job(cli: Cli) -> None:
    job = cli.submit("-l", "single", "-o", "x.out", "--setup", "sleep 600 &", cli.script("print('trained')"))
    assert {status["state"] for status in cli.wait_for_end(job)["statuses"]} == {"COMPLETED"}
    assert (cli.folder / "x.out").read_text().startswith("the logs of the ranks are in")


@WITHOUT_SSH
def test_failed_job_with_copied_output_keeps_its_exit_code(cli: Cli) -> None:
    script = cli.script("raise SystemExit(7)")
    done = cli(
        "submit", "--cluster", cli.cluster, "-t", "5", "-f", "-l", "single", "-o", "x.out", script, code=7
    )
    assert "failed" in done.stderr.lower()
    assert "failed first, with exit code 7" in (cli.folder / "x.out").read_text()


@ON_SLURM
def test_sbatch_options_reach_slurm_under_their_names(cli: Cli) -> None:
    script = cli.script("print('trained')")
    options = ("--comment", "for the paper", "--nice=7", "--mail-type=END", "--hold")
    job = cli.submit("-l", "single", *options, "--signal=B:USR1@120", script, "--nice=3")
    shown = subprocess.run(
        ["scontrol", "show", "job", job],
        env={**os.environ, **cli.env},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.search(r"Comment=dtslurm:\w+:\w+ for the paper", shown, re.MULTILINE)
    assert "Nice=7" in shown
    assert "Reason=JobHeldUser" in shown
    assert "MailType=END" in shown
    assert cli.status(job)["record"]["job_id"] == job
    assert cli.state(job) == "PENDING"
    cli("cancel", job)


BINDING = """\
extends: {cluster}
node_types:
  bound: {{rank_cpus: [{cpus}]}}
default_node_type: bound
"""


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
@WITHOUT_SSH
def test_ranks_run_on_the_cpus_given_by_the_profile(cli: Cli, launcher: str) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    profiles = cli.folder / "cluster_profiles"
    profiles.mkdir()
    profile = profiles / "bound.yaml"
    lists = ", ".join(f'"{cpu}"' for cpu in reversed(cpus))
    profile.write_text(BINDING.format(cluster=cli.cluster, cpus=lists))
    profile.chmod(0o644)
    script = cli.script("import os; print('cpus', *os.sched_getaffinity(0))")
    words = ("-l", launcher, "--ntasks-per-node", str(len(cpus)), "--python", sys.executable, script)
    job = cli("submit", "--cluster", "bound", "--parsable", "-t", "5", *words).stdout.strip()
    cli.started.append(job)
    assert {status["state"] for status in cli.wait_for_end(job)["statuses"]} == {"COMPLETED"}
    logs = cli.run_dir(job).path / "logs" / "0"
    texts = [(logs / f"rank-{rank}.log").read_text() for rank in range(len(cpus))]
    assert texts == [f"cpus {cpu}\n" for cpu in reversed(cpus)]
