"""The preflight: problems on the cluster are reported together before submission."""

from __future__ import annotations

import os
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit.prepare import Prepared, prepare
from dtslurm.services.submit.session import prepare_session
from dtslurm.services.wiring.context import Context
from tests.lab.cluster import SlurmLab


@pytest.fixture
def context(tmp_path: Path) -> Context:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return Context(cwd=tmp_path)


def prepare_job(context: Context, cluster: str, **asked: object) -> Prepared:
    request = JobRequest(script="train.py", time="10", cluster=cluster, **asked)  # type: ignore[arg-type]
    return prepare(context, request, standalone=False)


def test_missing_folders_and_interpreters_are_reported_together(context: Context) -> None:
    with pytest.raises(RequestInvalid) as caught:
        prepare_job(context, "local", python="/no/python", chdir="/no/folder")
    assert list(caught.value.problems) == [
        "the working directory /no/folder does not exist here",
        "the interpreter /no/python does not exist here",
    ]
    assert "--no-check" in caught.value.hint
    asked = {"python": "/no/python", "chdir": "/no/folder", "no_check": True}
    assert prepare_job(context, "local", **asked).submission.spec.python == "/no/python"


def test_a_missing_folder_below_a_folder_named_code_is_reported(context: Context) -> None:
    with pytest.raises(RequestInvalid, match="the working directory /no/code/project does not exist here"):
        prepare_job(context, "local", chdir="/no/code/project")


@pytest.mark.parametrize(
    "options", [{"dependency": "afterok:99"}, {"dependency": "afterok:99", "python": "/no/python"}]
)
def test_no_check_is_not_suggested_if_the_scheduler_refuses_the_job(
    context: Context, options: dict[str, object]
) -> None:
    with pytest.raises(RequestInvalid, match="there is no job 99") as caught:
        prepare_job(context, "local", **options)
    assert "--no-check" not in caught.value.hint


def test_no_check_skips_the_preflight(context: Context) -> None:
    assert (
        prepare_job(context, "local", python="/no/python", no_check=True).submission.spec.python
        == "/no/python"
    )


def test_a_missing_environment_is_refused(context: Context) -> None:
    context.env = {**context.env, "VIRTUAL_ENV": "/no/venv"}
    with pytest.raises(RequestInvalid, match="the environment /no/venv does not exist"):
        prepare_job(context, "local")


def test_an_interpreter_without_the_module_of_the_launcher_is_refused(
    context: Context, tmp_path: Path
) -> None:
    venv.create(tmp_path / "bare")
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(RequestInvalid, match=f"{python} has no module torch, which launcher torchrun needs"):
        prepare_job(context, "local", launcher="torchrun", python=python)
    for other in ({"setup": ("true",)}, {"env": ("PYTHONPATH=/x",)}, {"launcher": "srun"}):
        prepare_job(context, "local", **{"launcher": "torchrun", "python": python, **other})
    prepare_job(context, "local", launcher="torchrun", python=sys.executable)


@pytest.mark.parametrize(
    ("launcher", "options", "missing"),
    [
        ("accelerate", (), "modules torch and accelerate"),
        ("deepspeed", (), "modules torch and deepspeed"),
        ("deepspeed", ("form=nossh",), "modules torch and deepspeed"),
        ("deepspeed", ("form=torchrun",), "module torch"),
        ("deepspeed", ("form=srun",), "module torch"),
        ("nvrx", (), "modules torch and nvidia_resiliency_ext"),
        ("lightning", (), "module torch"),
    ],
)
def test_all_missing_modules_of_the_launcher_are_reported_together(
    context: Context, tmp_path: Path, launcher: str, options: tuple[str, ...], missing: str
) -> None:
    venv.create(tmp_path / "bare")
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(RequestInvalid) as caught:
        prepare_job(context, "local", launcher=launcher, launcher_options=options, python=python)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{python} has no {missing}, which launcher {launcher} needs: ")


def test_only_the_modules_that_are_missing_are_reported(context: Context, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "torch").mkdir()
    # What the interpreter prints is no part of the answer of the check.
    (packages / "noise.pth").write_text("import sys; print('free=0', flush=True); print('absent=torch')\n")
    context.env = {**context.env, "VIRTUAL_ENV": str(tmp_path / "venv")}
    with pytest.raises(RequestInvalid) as caught:
        prepare_job(context, "local", launcher="accelerate")
    assert list(caught.value.problems) == [
        (
            f"{tmp_path}/venv/bin/python has no module accelerate, which launcher accelerate needs: install "
            "the module for this interpreter, activate an environment that has it before you submit, or "
            "name another interpreter with --python"
        )
    ]
    (packages / "accelerate.py").touch()
    prepare_job(context, "local", launcher="accelerate")


def test_a_notebook_without_jupyter_is_refused(context: Context, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    options = {"cluster": "local", "time": "10", "python": python}
    with pytest.raises(RequestInvalid) as caught:
        prepare_session(context, "notebook", "30m", ("--debug",), options)
    assert list(caught.value.problems) == [
        (
            f"{python} has neither jupyterlab nor notebook nor jupyter_server, which a notebook needs: "
            "install jupyterlab for this interpreter, activate an environment that has it before you "
            "submit, or name another interpreter with --python"
        )
    ]
    assert "--no-check" in caught.value.hint
    prepare_session(context, "notebook", "30m", (), {**options, "setup": ("true",)})
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "notebook.py").touch()
    prepare_session(context, "notebook", "30m", ("--debug",), options)


def test_a_missing_configuration_file_of_the_launcher_is_refused(context: Context, tmp_path: Path) -> None:
    asked = {"launcher": "accelerate", "env": ("PYTHONPATH=/x",)}
    for path, full_path in (
        ("conf/fsdp.yaml", tmp_path / "conf/fsdp.yaml"),
        ("/no/fsdp.yaml", "/no/fsdp.yaml"),
    ):
        option = f"config_file={path}"
        with pytest.raises(RequestInvalid) as caught:
            prepare_job(context, "local", launcher_options=(option,), **asked)
        assert list(caught.value.problems) == [f"--launcher-option {option}: {full_path} does not exist here"]
        prepare_job(context, "local", launcher_options=(option,), setup=("write it",), **asked)
        prepare_job(context, "local", launcher_options=(option,), no_check=True, **asked)
    (tmp_path / "conf").mkdir()
    with pytest.raises(RequestInvalid, match="conf does not exist here"):
        prepare_job(context, "local", launcher_options=("config_file=conf",), **asked)
    (tmp_path / "conf/fsdp.yaml").touch()
    prepare_job(context, "local", launcher_options=("config_file=conf/fsdp.yaml",), **asked)
    prepare_job(context, "local", **asked)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodelist": "n9"}, "Invalid node name"),
        ({"partition": "main", "sbatch": ("--licenses=none",)}, "[Ll]icense"),
    ],
)
def test_a_request_that_slurm_refuses_in_its_dry_run_is_refused(
    context: Context, slurm_env: SlurmLab, options: dict[str, object], said: str
) -> None:
    context.env = {**context.env, **slurm_env.env}
    with pytest.raises(RequestInvalid, match=said) as caught:
        prepare_job(context, "slurm", **options)
    assert "--no-check" not in caught.value.hint


def test_a_request_that_needs_drained_nodes_is_accepted_with_a_notice(
    context: Context, slurm_env: SlurmLab
) -> None:
    """The dry run of Slurm refuses a job that Slurm would queue and start later."""
    slurm_env.run(["scontrol", "update", "nodename=n4", "state=drain", "reason=test"])
    try:
        notices = prepare_job(context, "slurm", python=sys.executable, nodes=4).submission.notices
    finally:
        slurm_env.run(["scontrol", "update", "nodename=n4", "state=resume"])
    assert any("sbatch --test-only: " in line for line in notices)


@pytest.fixture
def limited_account(slurm_env: SlurmLab) -> Iterator[str]:
    """An account of the user's with limits."""
    user = slurm_env.user
    limits = ["maxwall=00:20:00", "maxsubmit=3", "grptres=node=2"]
    try:
        slurm_env.run(["sacctmgr", "-i", "-Q", "add", "account", "small"])

        slurm_env.run(["sacctmgr", "-i", "-Q", "add", "user", user, "account=small", *limits])
        yield "small"
    finally:
        slurm_env.run(["sacctmgr", "-i", "-Q", "delete", "user", user, "account=small"])
        slurm_env.run(["sacctmgr", "-i", "-Q", "delete", "account", "small"])


@pytest.fixture
def enforced_associations(slurm_env: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the controller report that associations are enforced; accounting itself is real."""
    shim = tmp_path / "shim/scontrol"
    shim.parent.mkdir()
    shim.write_text(
        f'#!/bin/sh\n{slurm_env.program("scontrol")} "$@" | '
        "sed 's/^AccountingStorageEnforce .*/AccountingStorageEnforce = associations,limits,qos/'\n"
    )
    shim.chmod(0o700)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")


def test_account_limits_that_slurm_does_not_enforce_are_ignored(
    context: Context, slurm_env: SlurmLab, limited_account: str, tmp_path: Path
) -> None:
    context.env = {**context.env, **slurm_env.env, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert (
        prepare_job(
            context, "slurm", python=sys.executable, account=limited_account, nodes=3
        ).submission.layout.nodes
        == 3
    )


@pytest.mark.usefixtures("enforced_associations")
def test_f10_all_exceeded_account_limits_are_reported_together(
    context: Context, slurm_env: SlurmLab, limited_account: str, tmp_path: Path
) -> None:
    context.env = {**context.env, **slurm_env.env, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    request = JobRequest(
        script="train.py",
        time="30",
        cluster="slurm",
        account=limited_account,
        nodes=3,
        array="0-4",
        qos="mine",
    )
    with pytest.raises(RequestInvalid) as caught:
        prepare(context, request, standalone=False)
    text = "\n".join(caught.value.problems)
    for words in (
        "00:20:00 (MaxWall)",
        "5 array tasks",
        "node=3 is more",
        "node=2 (GrpTRES)",
        "you cannot use QOS 'mine'",
    ):
        assert words in text
    with pytest.raises(RequestInvalid, match=f"you have no account 'other'.*yours: lab.*{limited_account}"):
        prepare_job(context, "slurm", account="other")


@pytest.mark.usefixtures("enforced_associations")
def test_an_account_missing_in_the_cache_is_looked_up_again(
    context: Context, slurm_env: SlurmLab, tmp_path: Path
) -> None:
    context.env = {**context.env, **slurm_env.env, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    prepare_job(context, "slurm", account="lab")
    [path] = (tmp_path / "cache/dtslurm/sites").glob("*accounts.json")
    path.write_text(path.read_text().replace("lab|", "gone|"))
    assert prepare_job(context, "slurm", account="lab").submission.spec.resources.account == "lab"
