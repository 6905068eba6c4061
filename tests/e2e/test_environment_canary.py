"""The user's environment at submission is neither copied into a job without a request nor executed there."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import WITHOUT_SSH, Cli

PROGRAM = """
    import os
    marks = ("CANARY", "BASH_ENV", "LD_PRELOAD")
    print("told", sorted(name for name in os.environ if name.startswith(marks)))
"""


@WITHOUT_SSH
def test_c19_c20_submitter_environment_is_neither_copied_nor_executed(cli: Cli, tmp_path: Path) -> None:
    ran, script = tmp_path / "ran", tmp_path / "evil.sh"
    script.write_text(f"echo \"${{SLURM_JOB_ID-}}\" >>'{ran}'\n")
    cli.env |= {
        "CANARY_TOKEN": "c4n4ry",
        "BASH_ENV": str(script),
        "BASH_FUNC_srun%%": f"() {{ . '{script}'; }}",
    }
    job = cli.submit("--env", "CANARY_ASKED=yes", cli.script(PROGRAM))
    assert cli.wait_for_end(job, limit=180)["statuses"][0]["state"] == "COMPLETED"
    run = cli.run_dir(job)
    assert "told ['CANARY_ASKED']" in (run.logs(0) / "rank-0.log").read_text()
    words = ran.read_text().split() if ran.exists() else []
    assert (
        job not in words
    )  # a shell that the submitting command starts here may have read it: it is the user's
    written = [path for path in run.path.rglob("*") if path.is_file() and path.name != "train.py"]
    assert [path.name for path in written if b"c4n4ry" in path.read_bytes()] == []
