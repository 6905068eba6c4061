"""The cached facts about a login node, and the requirements of a remote job."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtslurm.errors import CommandNotFound, RequestInvalid, TransportError
from dtslurm.model.jobs.job import JobSpec, Submission
from dtslurm.services.preflight import preflight
from dtslurm.services.request import launcher_files
from dtslurm.services.wiring.context import Context
from dtslurm.services.wiring.login_node import (
    cache_path,
    expand_cluster_home,
    explain_local_path,
    find_remote_python,
    forget,
    query_login_node,
    variables_in,
)
from dtslurm.services.wiring.submission_worker import submission_worker_of
from dtslurm.transport.base import Completed
from dtslurm.transport.local import LocalTransport

TOLD = (
    "motd\nhost=login1\nhome=/home/ada\nuser=ada\nuid=1000\npython=python3\nvariable=SCRATCH=/scratch/ada\n"
)


class Login:
    """A login node that answers so, and counts how often it was asked."""

    host = "login1"

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked = 0

    def run(self, argv: list[str], timeout: float) -> Completed:
        del timeout
        self.asked += 1
        return Completed(tuple(argv), 0, self.answers.pop(0), "bash: no such file\n")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(cwd=tmp_path, clock=lambda: 1000.0, env={"HOME": str(tmp_path)})


def fake_cluster(login: Login) -> Any:
    return SimpleNamespace(name="hpc", transport=login, access=SimpleNamespace(python=None), remote=True)


def test_a_login_node_is_queried_once_a_day(context: Context) -> None:
    login = Login(TOLD, TOLD.replace("ada", "eve"), TOLD)
    first = query_login_node(context, fake_cluster(login), ["SCRATCH"])
    assert (first.home, first.uid, first.python) == ("/home/ada", 1000, "python3")
    assert first.env == {"SCRATCH": "/scratch/ada", "HOME": "/home/ada", "USER": "ada"}
    assert query_login_node(context, fake_cluster(login)) == first
    assert login.asked == 1
    context.clock = lambda: 1000.0 + 86_400
    assert query_login_node(context, fake_cluster(login)).user == "eve"
    forget(context, fake_cluster(login))
    forget(context, fake_cluster(login))  # nothing is left, which is no error
    assert query_login_node(context, fake_cluster(login)).user == "ada"


def test_a_tilde_is_expanded_to_the_home_of_the_cluster(context: Context, tmp_path: Path) -> None:
    login = Login(TOLD)
    expand = partial(expand_cluster_home, context, fake_cluster(login))
    assert (expand("/data"), expand("data/~"), login.asked) == ("/data", "data/~", 0)
    assert (expand("~/data"), expand("~"), login.asked) == ("/home/ada/data", "/home/ada", 1)
    with pytest.raises(RequestInvalid, match="~eve/data: write the absolute path"):
        expand("~eve/data")
    here: Any = SimpleNamespace(remote=False)
    assert expand_cluster_home(context, here, "~/data") == str(Path("~/data").expanduser())


def test_a_path_below_the_home_of_this_machine_is_explained(context: Context, tmp_path: Path) -> None:
    login = Login(TOLD, TOLD)
    explain = partial(explain_local_path, context, fake_cluster(login))
    assert explain(f"{tmp_path}/a") == (
        ": the path is below the home of this machine, and your home on login1 is /home/ada; "
        "write '~/a', with the quotes"
    )
    assert [explain(path) for path in ("/data", f"{tmp_path}-2/a")] == ["", ""]
    context.env = {**context.env, "HOME": "/home/ada"}
    assert explain("/home/ada/a") == ""


def test_a_login_node_is_queried_again_for_another_variable(context: Context) -> None:
    login = Login(TOLD, TOLD + "variable=WORK=/project/ada\nvariable=UNSET=\n")
    query_login_node(context, fake_cluster(login))
    login_node = query_login_node(context, fake_cluster(login), ["WORK"])
    assert (login_node.variables, login.asked) == ({"SCRATCH": "/scratch/ada", "WORK": "/project/ada"}, 2)


@pytest.mark.parametrize("name", ["python3.11", "python3.6", "python"])
def test_a_login_node_is_usable_with_one_python_of_any_usual_name(
    context: Context, tmp_path: Path, name: str
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for tool in ("id", "uname"):
        (programs / tool).symlink_to(shutil.which(tool) or tool)
    (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / name).chmod(0o755)

    class Here(LocalTransport):
        host = "login1"

        def run(self, argv: Sequence[str], **options: Any) -> Completed:
            return super().run(["/bin/sh", *argv[1:]], env={"PATH": str(programs)}, **options)

    here: Any = Here()
    assert find_remote_python(context, fake_cluster(here))


@pytest.mark.parametrize("cached_text", ["", "[]", '{"host": 1}', '{"nonsense": 1}'])
def test_a_damaged_login_node_cache_is_replaced(context: Context, cached_text: str) -> None:
    login = Login(TOLD)
    path = cache_path(context, fake_cluster(login))
    path.parent.mkdir(parents=True)
    path.write_text(cached_text)
    assert query_login_node(context, fake_cluster(login)).host == "login1"
    assert json.loads(path.read_text())["home"] == "/home/ada"


@pytest.mark.parametrize("answer", ["", "home=\n", "home=relative\n"])
def test_a_login_node_without_a_home_folder_is_an_error(context: Context, answer: str) -> None:
    with pytest.raises(TransportError, match="cannot find the home folder on login1") as caught:
        query_login_node(context, fake_cluster(Login(answer)))
    assert "bash: no such file" in caught.value.evidence


def test_a_user_id_that_is_no_number_is_unknown(context: Context) -> None:
    assert query_login_node(context, fake_cluster(Login(TOLD.replace("uid=1000", "uid=?")))).uid is None


def test_a_login_node_without_python_is_queried_again_and_refused(context: Context) -> None:
    login = Login(*[TOLD.replace("python=python3\n", "")] * 3, TOLD)
    assert query_login_node(context, fake_cluster(login)).python == ""
    for ask in (find_remote_python, submission_worker_of):
        with pytest.raises(CommandNotFound, match=r"login1 has no Python 3\.6") as caught:
            ask(context, fake_cluster(login))
        assert caught.value.hint == "set login.python in the cluster's profile"
    assert find_remote_python(context, fake_cluster(login)) == "python3"  # one was put there
    assert login.asked == 4


def test_variables_in_lists_the_variables_of_a_path() -> None:
    assert variables_in("$SCRATCH/${WORK}/$HOME/$SCRATCH/x") == ["SCRATCH", "WORK"]


# ---- What must be there when the job starts ----

SPEC = JobSpec(name="train", script="train.py", work_dir="/w", launcher="srun", python="/venv/bin/python")


def submission_of(spec: JobSpec) -> Submission:
    nothing: Any = None
    return Submission(
        token="0", cluster="c", spec=spec, layout=nothing, run_dir="/runs/train-1", script=""
    )  # fmt: skip


def required_paths(spec: JobSpec, *, remote: bool) -> dict[str, str]:
    where: Any = SimpleNamespace(remote=remote, transport=SimpleNamespace(host="login1"))
    needed_paths = preflight._list_needed_paths(submission_of(spec), where)
    return {letter + path: result for letter, path, result in needed_paths}


def test_a_remote_job_requires_its_folder_script_and_interpreter() -> None:
    assert required_paths(SPEC, remote=True) == {
        "d/w": "the working directory /w does not exist on login1",
        "f/w/train.py": "the script /w/train.py does not exist on login1",
        "x/venv/bin/python": "the interpreter /venv/bin/python does not exist on login1",
    }
    sent_with_the_run = replace(SPEC, script="/runs/train-1/runner.py")
    assert list(required_paths(sent_with_the_run, remote=True)) == ["d/w", "x/venv/bin/python"]
    assert list(required_paths(replace(SPEC, module=True, activate="/venv"), remote=True)) == [
        "d/w", "d/venv", "x/venv/bin/python",
    ]  # fmt: skip
    assert list(required_paths(replace(SPEC, work_dir="/runs/train-1/code/sub"), remote=True)) == [
        "x/venv/bin/python"
    ]


def test_files_of_the_launcher_must_exist_on_the_machine_of_the_job() -> None:
    def needed(path: str, **fields: Any) -> list[str]:
        spec = replace(SPEC, launcher="accelerate", launcher_options={"config_file": path}, **fields)
        needed_files = launcher_files.list_needed_files(submission_of(spec), "on login1")
        return [letter + path for letter, path, _ in needed_files]

    in_snapshot = "/runs/train-1/code/sub"
    assert needed("fsdp.yaml") == ["f/w/fsdp.yaml"]
    assert needed("fsdp.yaml", work_dir="/home/me/code/project") == ["f/home/me/code/project/fsdp.yaml"]
    assert needed("fsdp.yaml", work_dir=in_snapshot) == []  # it is sent with the run
    assert needed("/data/fsdp.yaml", work_dir=in_snapshot) == ["f/data/fsdp.yaml"]
    assert needed("/data/fsdp.yaml", container="docker://x") == []  # the path is in the image
    assert needed("fsdp.yaml", setup=("write fsdp.yaml",)) == []


def test_a_container_job_requires_its_image_and_mounts() -> None:
    boxed = replace(
        SPEC, container="/images/a.sif", container_mounts=("/data:/d:ro", "$SCRATCH:/s"), activate="/venv"
    )
    assert list(required_paths(boxed, remote=True)) == ["d/w", "f/w/train.py", "e/images/a.sif", "e/data"]
    assert list(required_paths(boxed, remote=False)) == ["d/w"]
    assert list(required_paths(replace(boxed, container="docker://x"), remote=True)) == [
        "d/w",
        "f/w/train.py",
        "e/data",
    ]


@pytest.mark.parametrize(
    ("answer", "messages"),
    [
        ({"free": "10", "files": "50"}, ["is full: 10.0 KiB are free", "has room for only 50 more files"]),
        ({"free": "99999999", "files": "0"}, []),
        ({"free": "?", "files": ""}, []),
    ],
)
def test_a_full_disk_under_the_run_root_is_reported(answer: dict[str, str], messages: list[str]) -> None:
    said = list(preflight._space(answer, "/runs/a"))
    assert [words in line for words, line in zip(messages, said, strict=True)] == [True] * len(messages)


@pytest.mark.parametrize(
    ("there", "messages"),
    [
        ("1000", []),
        ("?", []),
        ("2000", ["the cluster's clock is 1000 s ahead of this machine's"]),
        ("500", ["the cluster's clock is 500 s behind this machine's"]),
    ],
)
def test_a_cluster_clock_that_differs_is_reported(there: str, messages: list[str]) -> None:
    assert list(preflight._clock(there, 999.0, 1001.0)) == messages


# ---- Ways to a cluster ----


def test_a_cluster_without_a_login_host_is_reachable_only_locally(tmp_path: Path) -> None:
    context = Context(cwd=tmp_path, env={"HOME": str(tmp_path), "PATH": "/nowhere"})
    with pytest.raises(RequestInvalid, match="cannot be reached with transport openssh: its profile has no"):
        context.cluster("a100x8-ib", "openssh")
    assert context.cluster("a100x8-ib").remote is False
    with pytest.raises(RequestInvalid, match="cluster slurm needs Slurm, and there is no"):
        context.cluster_without_profile(None)


@pytest.mark.parametrize(
    ("env", "chosen"),
    [
        ({"DTSLURM_CLUSTER": "mine"}, ("mine", "$DTSLURM_CLUSTER")),
        ({"PATH": "/nowhere"}, ("local", "no Slurm on this machine")),
    ],
)
def test_the_default_cluster_comes_from_the_environment_or_is_local(
    tmp_path: Path, env: dict[str, str], chosen: tuple[str, str]
) -> None:
    assert Context(cwd=tmp_path, env={"HOME": str(tmp_path), **env}).default_cluster() == chosen


def test_the_default_cluster_on_a_slurm_host_is_slurm(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    context = Context(cwd=tmp_path, env={"HOME": str(tmp_path), "PATH": str(tmp_path)})
    assert context.default_cluster() == ("slurm", "the Slurm on this machine")
