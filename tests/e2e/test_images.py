"""Images that are pulled once for all runs, with a program in place of the container runtime."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from tests.e2e.conftest import ON_SLURM, Cli

# `pull` writes half an image, waits for the file GO and writes the rest; `exec` runs a command with $IMAGE.
APPTAINER = """\
#!/bin/bash
here="$(dirname "$(dirname "$0")")"
case "$1" in
pull)
  echo "$$ $3" >>"$here/pulls"
  echo half >"$2"
  until [ -e "$here/go" ]; do sleep 0.1; done
  [ "$3" != docker://none:1 ] || { echo "FATAL:   While pulling image: manifest unknown"; exit 1; }
  echo whole >>"$2" ;;
exec)
  shift
  while [[ "$1" == --* ]]; do shift; done
  IMAGE="$1" exec "${@:2}" ;;
esac
"""
TRAIN = """\
import os
print(open(os.environ["IMAGE"]).read().split(), os.path.basename(os.environ["IMAGE"]))
"""


@pytest.fixture
def boxed(cli: Cli) -> Cli:
    programs = cli.folder / "bin"
    programs.mkdir()
    (programs / "apptainer").write_text(APPTAINER)
    (programs / "apptainer").chmod(0o755)
    (cli.folder / "cluster_profiles").mkdir()
    text = f"extends: {cli.cluster}\ncontainer: {{runtime: apptainer}}\nenvironment:\n"
    text += f"  setup: ['export PATH=\"{programs}:$PATH\"']\n"
    (cli.folder / "cluster_profiles" / "boxed.yaml").write_text(text)
    cli.script(TRAIN)
    return Cli("boxed", cli.folder, cli.env, cli.started)


def submit(boxed: Cli, image: str = "torch:2.9", ranks: str = "1") -> str:
    words = ("-N", ranks, "--ntasks-per-node", ranks, "-l", "srun", "--python", sys.executable)
    return boxed.submit(*words, "--container", image, "train.py")


def pull_commands(boxed: Cli) -> list[list[str]]:
    path = boxed.folder / "pulls"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def image_files(boxed: Cli) -> list[Path]:
    return sorted((Path(boxed.env["DTSLURM_RUN_ROOT"]) / ".images").glob("*.sif"))


def rank_output(boxed: Cli, job: str) -> list[str]:
    return [path.read_text().strip() for path in sorted(boxed.run_dir(job).logs(0).glob("rank-*.log"))]


@ON_SLURM
def test_jobs_with_the_same_image_pull_the_image_once(boxed: Cli) -> None:
    first = submit(boxed, ranks="2")
    boxed.wait_until(lambda: pull_commands(boxed), limit=120)
    second = submit(boxed, ranks="2")
    boxed.wait_until(lambda: boxed.state(second) == "RUNNING", limit=120)
    assert rank_output(boxed, first) == rank_output(boxed, second) == []  # nobody runs in half an image
    assert image_files(boxed) == []
    (boxed.folder / "go").touch()
    third = submit(boxed, ranks="2")
    for job in (first, second, third):
        assert boxed.wait_for_end(job, limit=180)["statuses"][0]["state"] == "COMPLETED"
        [image] = image_files(boxed)
        assert rank_output(boxed, job) == [f"['half', 'whole'] {image.name}"] * 4
    assert [words[1] for words in pull_commands(boxed)] == ["docker://torch:2.9"]


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_partial_image_is_not_used(boxed: Cli) -> None:
    first = submit(boxed)
    boxed.wait_until(lambda: pull_commands(boxed), limit=120)
    os.kill(int(pull_commands(boxed)[0][0]), signal.SIGKILL)
    assert boxed.wait_for_end(first, limit=180)["statuses"][0]["state"] == "FAILED"
    assert rank_output(boxed, first) == []
    assert image_files(boxed) == []
    (boxed.folder / "go").touch()
    second = submit(boxed)
    assert boxed.wait_for_end(second, limit=180)["statuses"][0]["state"] == "COMPLETED"
    assert len(pull_commands(boxed)) == 2


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_missing_image_is_named(boxed: Cli) -> None:
    (boxed.folder / "go").touch()
    job = submit(boxed, "none:1")
    assert boxed.wait_for_end(job, limit=180)["statuses"][0]["state"] == "FAILED"
    text = (boxed.run_dir(job).path / "logs" / "batch.log").read_text()
    assert "the image could not be pulled: docker://none:1" in text
    assert image_files(boxed) == []
    assert '"cause": "container' in boxed("diagnose", "--json", job, code=None).stdout


@pytest.mark.parametrize("cli", ["local"], indirect=True)
def test_image_with_the_tag_latest_is_pulled_for_each_run(boxed: Cli) -> None:
    (boxed.folder / "go").touch()
    for count in (1, 2):
        job = submit(boxed, "torch")
        assert boxed.wait_for_end(job, limit=180)["statuses"][0]["state"] == "COMPLETED"
        assert rank_output(boxed, job) == ["['half', 'whole'] image.sif"]
        assert len(pull_commands(boxed)) == count
    assert image_files(boxed) == []


@ON_SLURM
def test_roles_run_in_images_of_their_own(boxed: Cli) -> None:
    (boxed.folder / "go").touch()
    python = sys.executable
    show = "\"import os, time; print('image', os.environ.get('IMAGE'), flush=True); time.sleep(600)\""
    server = f"on: trainer, ready: {{line: ^image }}, command: [{python}, -c, {show}]"
    (boxed.folder / "job.yaml").write_text(
        textwrap.dedent(f"""\
        time: 10
        container: torch:2.9
        roles:
          trainer: {{script: train.py, launcher: srun, python: {python}}}
          same: {{{server}}}
          other: {{{server}, container: vllm:0.9}}
          bare: {{{server}, container: none}}
        """)
    )
    job = boxed.submit("job.yaml")
    boxed.wait_for_end(job)
    [trained] = rank_output(boxed, job)
    roles = boxed.run_dir(job).path / "roles"
    images = {
        name: (roles / f"{name}-0" / "logs/0/rank-0.log").read_text().split("/")[-1].strip()
        for name in ("same", "other", "bare")
    }
    assert images["same"].startswith("torch-2.9")
    assert trained.endswith(images["same"])
    assert images["other"].startswith("vllm-0.9")
    assert images["bare"] == "image None"
    assert sorted(source for *_, source in pull_commands(boxed)) == [
        "docker://torch:2.9",
        "docker://vllm:0.9",
    ]
