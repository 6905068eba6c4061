"""The modules that commands must not import, because imports slow down every start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from dtslurm.model.runs.record import JobRecord
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.login_node import LoginNode, cache_path
from dtslurm.store import codec
from dtslurm.store.rundir import RunDir

HEAVY = {"torch", "paramiko", "submitit", "textual", "jinja2", "pydantic"}


def imported_modules(*words: str) -> set[str]:
    program = (
        "import sys; sys.argv = ['dtslurm', *sys.argv[1:]]\n"
        "from dtslurm.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('\\nMODULES', *sys.modules)"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    argv = [sys.executable, "-c", program, *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
    return set(done.stdout.rsplit("MODULES", 1)[1].split())


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["status"]])
def test_short_commands_import_no_heavy_module(words: list[str]) -> None:
    assert imported_modules(*words) & HEAVY == set()


def test_help_imports_no_command_module() -> None:
    modules = imported_modules("--help")
    loaded = {name for name in modules if name.startswith("dtslurm.")}
    assert loaded <= {
        "dtslurm.__main__",
        "dtslurm.cli",
        "dtslurm.cli.main",
        "dtslurm.errors",
        "dtslurm.interrupts",
    }
    assert modules & {"pathlib", "json", "dataclasses"} == set()


def test_render_help_imports_no_submission_module() -> None:
    assert imported_modules("render", "--help") & {"torch", "paramiko", "submitit", "textual"} == set()


def test_render_imports_no_job_file_module_and_no_package_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = imported_modules("render", "--cluster", "a100x8-ib", "-A", "x", "-t", "60", "train.py")
    assert "dtslurm.render.script" in loaded
    unneeded = {"config.job_files.jobs", "model.job_file", "model.sweep", "model.diagnosis"}
    assert loaded & {"importlib.metadata", "email", *(f"dtslurm.{name}" for name in unneeded)} == set()


def test_plan_imports_only_needed_modules() -> None:
    loaded = imported_modules("plan", "gpt2", "--gpu", "A100", "--json")
    assert loaded & (HEAVY | {"numpy", "rich", "yaml", "dtslurm.services.wiring.context"}) == set()


@pytest.fixture
def remote_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a job on a cluster behind SSH with a cached profile; return the user's folder."""
    profile = tmp_path / "CONFIG/dtslurm/cluster_profiles/far.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("extends: slurm\nlogin: {host: nowhere, transport: openssh}\n")
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho No route to host >&2; exit 255\n")
    ssh.chmod(0o700)
    for kind in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    context = Context()
    monkeypatch.setattr("time.time_ns", lambda: 4_000_000_000 * 10**9)  # all was written long ago
    assert context.cluster("far").path == profile
    run = tmp_path / "run"
    record = JobRecord(
        token="0123456789ab",
        cluster="far",
        name="train",
        run_dir=str(run),
        phase="submitted",
        created_at=1.0,
        profile=str(profile),
        mirror=str(run),
        job_id="7",
    )
    RunDir(run).create(context.transport, {"job.json": codec.encode({"schema": 1, **codec.plain(record)})})
    context.index.put(record)
    site = LoginNode("nowhere", "/home/me", "me", "/usr/bin/python3", 1000, seen_at=context.clock())
    path = cache_path(context, context.cluster_of(record))
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(asdict(site)))
    return tmp_path


@pytest.mark.usefixtures("remote_job")
def test_status_of_a_remote_job_imports_no_profile_or_submission_module() -> None:
    loaded = imported_modules("status", "--cluster", "far")
    assert {"dtslurm.scheduler.slurm", "dtslurm.transport.ssh.openssh"} <= loaded
    models = {name.rpartition(".")[2] for name in loaded if name.startswith("dtslurm.model.")}
    assert models == {
        "access", "activity", "exit_codes", "own_files", "paths", "queue", "record", "runs",
        "shell", "state", "units", "values",
    }  # fmt: skip
    assert loaded & (HEAVY | {"rich", "yaml", "logging", "tempfile"}) == set()
    assert {name for name in loaded if name.startswith(("dtslurm.config", "dtslurm.launch"))} == set()
