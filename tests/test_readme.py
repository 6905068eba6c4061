"""Every command in the README, in CONTRIBUTING and in docs/ is executed."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pictures
from tests.lab.cluster import SlurmLab
from tests.waiting import wait_until
from tests.warm import run_dtslurm

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def command_lines(document: str) -> list[str]:
    """Return the command lines of the code blocks, without their comments."""
    blocks = BLOCK.findall((ROOT / document).read_text())
    lines = "".join(text for language, text in blocks if not language).splitlines()
    texts = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    return [line for line in texts if line.startswith(("dtslurm ", "make ", "pip "))]


PAGES = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tasks").glob("*.md")]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in PAGES)]
COMMANDS = {line for document in DOCUMENTS for line in command_lines(document) if line.startswith("dtslurm")}
DTSLURM = sorted(COMMANDS - {"dtslurm init"})


@pytest.fixture(scope="module")
def project(
    slurm_lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str], str]:
    """A project folder, the environment of a login node with our venv active, and the id of a queued run."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "train.py").write_text("print('hello')\n")
    write_documented_files(folder)
    (folder / "cluster_profiles").mkdir()
    (folder / "cluster_profiles" / "mycluster.yaml").write_text("extends: a100x8-ib\n")
    (folder / "cluster_profiles" / "ours.yaml").write_text("extends: slurm\n")
    environment = {
        **slurm_lab.environ({"VIRTUAL_ENV": str(Path(sys.executable).parents[1])}),
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "DTSLURM_RUN_ROOT": str(folder / "runs"),
        "TRAINING_CHANNEL": "json://127.0.0.1:9/nobody",
    }
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    run_line(folder, environment, "dtslurm trust")
    (folder / "short.py").write_text("import time\ntime.sleep(2)\n")
    job = run_line(folder, environment, "dtslurm submit --parsable -t 5 short.py").stdout.strip()
    return folder, environment, job


def write_documented_files(folder: Path) -> None:
    """Write the YAML files that the commands of the pages in docs/tasks name."""
    for page, name in (("accelerate.md", "fsdp.yaml"), ("vllm.md", "grpo.yaml")):
        text = (ROOT / "docs" / "tasks" / page).read_text()
        [block] = [block for _, block in BLOCK.findall(text) if block.startswith(f"# {name}\n")]
        (folder / name).write_text(block)
        (folder / name).chmod(0o644)


def run_dir(folder: Path, job: str) -> Path:
    [parent] = [
        path.parent
        for path in (folder / "runs").glob("*/job.json")
        if json.loads(path.read_text())["job_id"] == job
    ]
    return parent


def run_line(folder: Path, environment: dict[str, str], line: str) -> subprocess.CompletedProcess[str]:
    done = run_dtslurm(shlex.split(line)[1:], cwd=folder, env=environment, timeout=600)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done


def leave_artifacts(run: Path) -> None:
    """Write a checkpoint, an exported model and their entries, as a training job does."""
    for path, kind in (
        ("checkpoints/step-00000200-a0/model.pt", "checkpoint"),
        ("export/model.safetensors", "file"),
    ):
        file = run / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("weights\n")
        what = file.parent if kind == "checkpoint" else file
        line = {"schema": 1, "time": 1.0, "path": str(what.relative_to(run)), "kind": kind, "step": 200}
        with (run / "artifacts.jsonl").open("a") as register:
            register.write(json.dumps(line) + "\n")


def succeeds(folder: Path, environment: dict[str, str], line: str) -> bool:
    return run_dtslurm(shlex.split(line)[1:], cwd=folder, env=environment, timeout=600).returncode == 0


def submit_roles(folder: Path, environment: dict[str, str], *, seconds: int) -> str:
    """Submit a run with the roles that the documentation names, and return its job id.

    Args:
        seconds: how long the main role runs.
    """
    server = "{command: [python3, -m, http.server, '${port.http}'], on: trainer, ready: {tcp: true}}"
    main = "{script: roles.py, launcher: srun, time: 5}"
    (folder / "roles.py").write_text(f"import time\ntime.sleep({seconds})\n")
    (folder / "roles.yaml").write_text(f"roles:\n  trainer: {main}\n  rollout: {server}\n  judge: {server}\n")
    (folder / "roles.yaml").chmod(0o644)
    return run_line(folder, environment, "dtslurm submit --parsable roles.yaml").stdout.strip()


def submit_waiting(folder: Path, environment: dict[str, str]) -> str:
    """Submit a job with two ranks that wait, and return its id when both have begun."""
    (folder / "wait.py").write_text("import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    words = "dtslurm submit --parsable -t 5 --ntasks-per-node 2 -l srun wait.py"
    job = run_line(folder, environment, words).stdout.strip()
    wait_until(lambda: run_line(folder, environment, f"dtslurm logs {job}").stdout.count("began") == 2)
    return job


def wait_for_requirements(
    line: str, project: tuple[Path, dict[str, str], str], slurm_lab: SlurmLab, job: str
) -> None:
    folder, environment, _ = project
    if " --from-checkpoint" in line:  # while it runs, its checkpoints are its own
        run_line(folder, environment, f"dtslurm logs -f {job}")
    if " report " in line:
        slurm_lab.wait_for("a start", (run_dir(folder, job) / "logs" / "0").exists)
    if line == "dtslurm doctor":
        slurm_lab.wait_for("the controller", lambda: slurm_lab.ok(["scontrol", "ping"]))


@pytest.mark.parametrize("line", DTSLURM)
def test_every_documented_dtslurm_command_succeeds(
    line: str, project: tuple[Path, dict[str, str], str], slurm_lab: SlurmLab
) -> None:
    folder, environment, job = project
    # So many commands in a row would use up what a user may ask of a scheduler.
    shutil.rmtree(folder / "cache" / "dtslurm" / "queues", ignore_errors=True)
    line = re.sub(r"\b(17|18|4711)\b", job, line)
    # The environment of this test lacks these frameworks, which `submit` would report.
    line = re.sub(r" submit (?=.*-l (accelerate|deepspeed)\b)", " submit --no-check ", line)
    if " --role " in line or " scale " in line:
        # logs -f returns at the end of the run; the other commands need one that has not ended.
        seconds = 0 if " -f " in line else 600
        line = line.replace(job, roles_job := submit_roles(folder, environment, seconds=seconds))
        job = roles_job
    elif " exec " in line:
        line = line.replace(job, running_job := submit_waiting(folder, environment))
        job = running_job
    elif " cancel " in line or " logs -f" in line:
        (folder / "short.py").touch()
        job = run_line(folder, environment, "dtslurm submit --parsable -t 5 short.py").stdout.strip()
        line = f"{line.rpartition(' ')[0]} {job}"
    if "/data/imagenet" in line:
        (folder / "imagenet").mkdir(exist_ok=True)
        (folder / "imagenet" / "0.jpg").write_text("a picture\n")
        line = line.replace("/data/imagenet", str(folder / "imagenet"))
    if " artifacts " in line:
        leave_artifacts(run_dir(folder, job))
    if " --live " in line:
        (folder / "long.py").write_text("import time\ntime.sleep(600)\n")
        job = run_line(folder, environment, "dtslurm submit --parsable -t 20 long.py").stdout.strip()
        line = f"{line.rpartition(' ')[0]} {job}"
        slurm_lab.wait_for("a rank of it", lambda: succeeds(folder, environment, line))
    if " sweep " in line:
        (folder / "sweep.yaml").write_text(
            "script: short.py\ntime: 5\nargs: ['${a}']\nsweep: {grid: {a: [1]}}\n"
        )
        (folder / "sweep.yaml").chmod(0o644)
        job = run_line(folder, environment, "dtslurm submit --parsable --wait sweep.yaml").stdout.strip()
        line = f"{line.rpartition(' ')[0]} {job}"
    wait_for_requirements(line, project, slurm_lab, job)
    done = run_line(folder, environment, line)
    if any(word in line for word in (" --live ", " --role ", " scale ", " exec ")):
        run_line(folder, environment, f"dtslurm cancel {job}")
    if " submit " in line and " --wait " not in line:
        match = re.search(r"submitted job (\d+)", done.stderr)
        assert match
        run_line(folder, environment, f"dtslurm cancel {match[1]}")


def test_documented_setup_succeeds(project: tuple[Path, dict[str, str], str]) -> None:
    """Its questions are answered in tests/e2e/test_init.py."""
    folder, environment, _ = project
    assert "dtslurm init" in command_lines("docs/tutorial.md")
    (folder / "new").mkdir()
    run_line(folder / "new", environment, "dtslurm init --yes")


def test_the_other_documented_commands_are_known() -> None:
    """``make`` and ``pip`` lines are executed by CI itself, test_demo.py and test_packaging.py."""
    others = {
        line
        for line in [*command_lines("README.md"), *command_lines("CONTRIBUTING.md")]
        if line not in DTSLURM
    }
    assert others == {
        "make demo",
        "make test",
        "make test-quick",
        "make test-all",
        "make check",
        "make install-dev",
        "pip install .",
        "pip install '.[torch]'",
    }


def test_every_documented_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in ("demo", "test", "test-quick", "test-all", "check", "install-dev"):
        assert re.search(rf"^{line}:", makefile, re.MULTILINE), line


def test_layout_of_a_run_is_described() -> None:
    text = (ROOT / "docs" / "run-directory.md").read_text()
    for name in ("job.json", "script.sbatch", "events.jsonl", "DTSLURM_METRICS", "DTSLURM_CHECKPOINT_DIR"):
        assert name in text
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_readme_is_short_and_its_links_resolve() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    targets = re.findall(r"\]\(([^)#]+)", text)
    assert targets
    assert [name for name in targets if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", pictures.SESSIONS)
def test_pictures_show_sessions_that_really_run(name: str, tmp_path: Path) -> None:
    """The text differs only in what times, numbers and speed decide."""
    picture = (ROOT / "docs" / f"{name}.svg").read_text()
    outputs = pictures.record(tmp_path, pictures.SESSIONS[name])
    fresh = pictures.draw(outputs, name)
    for command in pictures.SESSIONS[name]:
        assert command in shown_text(picture)
    expected = {
        "session": "cause python-exception (90%)",
        "check": "--gpus-per-node 8: a gpu-40g node has 4",
        "survive": "attempt 1 ended with exit code 0: every rank ended with 0",
        "plan": "memory of a GPU:",
    }[name]
    for text in (picture, fresh):
        assert expected in shown_text(text)
        assert "http" not in re.sub(
            r"xmlns[:\w]*=\"[^\"]*\"|<!--.*?-->", "", text
        )  # asks nothing of a network
        assert str(ROOT) not in text


def shown_text(picture: str) -> str:
    """Return the text of a picture, with one space between its words."""
    texts = re.findall(r"<text [^>]*>(.*?)</text>", picture)
    return " ".join(html.unescape(" ".join(texts)).replace("\xa0", " ").split())
