"""Options of sbatch under their own names."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from dtslurm.cli.commands.submit import submit
from dtslurm.model.jobs.sbatch_names import WITH_OPTIONAL_VALUE, WITH_VALUE, WITHOUT_VALUE
from tests.cli.conftest import Run

RENDER = ("render", "--cluster", "a100x8-ib", "-A", "x", "-t", "10", "-l", "srun")
EVERY = WITH_VALUE | WITH_OPTIONAL_VALUE | WITHOUT_VALUE


@pytest.fixture(autouse=True)
def write_script(folder: Path) -> None:
    (folder / "train.py").write_text("")


def directives(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "directive"),
    [
        (("--comment", "a b"), '--comment="a b"'),
        (("--mail-type=END",), "--mail-type=END"),
        (("--mail-user", "me@x"), "--mail-user=me@x"),
        (("--exclusive",), "--exclusive"),
        (("--exclusive=user",), "--exclusive=user"),
        (("--licenses", "fs:2"), "--licenses=fs:2"),
        (("--nice",), "--nice"),
        (("--nice=100",), "--nice=100"),
        (("--begin", "now+1hour"), "--begin=now+1hour"),
        (("--hint=nomultithread",), "--hint=nomultithread"),
        (("--hold",), "--hold"),
        (("--gres", "nvme:200"), "--gres=nvme:200"),
        (("--signal=B:USR1@300",), "--signal=USR1@300"),
        (("--signal", "SIGTERM@60"), "--signal=TERM@60"),
        (("--signal=10@90",), "--signal=USR1@90"),
        (("--signal", "B:USR1"), "--signal=USR1@60"),
        (("--reservation", "r"), "--reservation=r"),
        (("-o", "logs/%x-%j.out"), "--output=logs/%x-%j.out"),
        (("-e", "%j.err"), "--error=%j.err"),
    ],
)
def test_sbatch_options_become_directives(words: tuple[str, ...], directive: str, invoke: Run) -> None:
    said = directives(invoke(*RENDER, *words, "train.py", code=0).stdout)
    assert said.count(directive) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ntasks", "3"), "use --ntasks-per-node"),
        (("--gpus-per-task=2",), "use --gpus-per-node"),
        (("--clusters=b",), "select the profile of the other cluster with --cluster"),
        (("--wrap", "hostname"), "--setup runs lines before training"),
        (("--export=ALL",), "--env and --setup extend it"),
        (("--parsable",), "dtslurm reads sbatch's answer itself"),
        (("--signal", "USR1@300", "--signal-before", "60"), "contradict each other"),
        (("--signal", "R:USR1@300"), "is not one of HUP"),
        (("--gres=mps:50", "--gpus-per-node", "1"), "a part of a GPU: give only one of these options"),
    ],
)
def test_sbatch_options_that_dtslurm_sets_are_refused(
    words: tuple[str, ...], message: str, invoke: Run
) -> None:
    assert message in " ".join(invoke(*RENDER, *words, "train.py", code=2).stderr.split())


def test_counts_that_match_the_layout_are_omitted(invoke: Run) -> None:
    words = ("-N2", "--gpus-per-node", "4", "--ntasks=8", "--gpus-per-task=1")
    said = directives(invoke(*RENDER, *words, "train.py", code=0).stdout)
    assert not [line for line in said if line.startswith(("--ntasks=", "--gpus-per-task"))]


def test_mem_per_cpu_replaces_the_memory_of_the_profile(invoke: Run) -> None:
    said = directives(invoke(*RENDER, "--mem-per-cpu", "4G", "train.py", code=0).stdout)
    assert [line for line in said if line.startswith("--mem")] == ["--mem-per-cpu=4G"]


def test_a_gres_for_a_part_of_a_gpu_requests_no_whole_gpus(invoke: Run) -> None:
    text = invoke(*RENDER, "--gres=mps:50", "--ntasks-per-node", "2", "train.py", code=0).stdout
    said = directives(text)
    assert "--gres=mps:50" in said
    assert not [line for line in said if "gpus" in line]
    assert "ACCELERATE_USE_CPU" not in text


def test_sbatch_options_after_the_script_are_arguments_of_the_script(invoke: Run) -> None:
    arguments = ("--exclusive=user", "--comment", "x", "--nice", "--hold")
    done = invoke(*RENDER, "--exclusive", "train.py", *arguments, code=0)
    assert f"train.py {' '.join(arguments)} " in done.stdout
    assert "--exclusive" in directives(done.stdout)
    assert not [line for line in directives(done.stdout) if "comment" in line or "nice" in line]


def test_options_after_a_job_file_belong_to_dtslurm_up_to_two_dashes(folder: Path, invoke: Run) -> None:
    (folder / "job.yaml").write_text("script: train.py\n")
    (folder / "job.yaml").chmod(0o644)
    done = invoke(*RENDER, "job.yaml", "--exclusive=user", "--comment", "x", "--", "--nice=3", code=0)
    assert {"--exclusive=user", "--comment=x"} <= set(directives(done.stdout))
    assert "train.py --nice=3 " in done.stdout


def test_a_misspelt_sbatch_option_is_refused_with_a_suggestion(invoke: Run) -> None:
    done = invoke(*RENDER, "--exclusiv", "train.py", code=2)
    assert "No such option" in done.stderr
    assert "--exclusive" in done.stderr


def test_the_help_mentions_sbatch_options_in_one_line(invoke: Run) -> None:
    text = " ".join(invoke("submit", "--help", code=0).stdout.split())
    assert "sbatch's own names work too" in text
    assert "--mail-user" not in text


def test_the_manual_page_of_sbatch_has_no_unknown_options() -> None:
    page = Path("/usr/share/man/man1/sbatch.1.gz")
    if not page.exists():
        pytest.skip("sbatch's manual page is not here")
    text = re.sub(r"\\f[A-Z]", "", gzip.decompress(page.read_bytes()).decode()).replace("\\-", "-")
    matches = re.findall(r"^(?:-\w, )?--([a-z][a-z-]+)(\[=)?(=)?.*$", text, re.MULTILINE)
    assert len(matches) > 80
    own = {word[2:] for param in submit.params for word in (*param.opts, *param.secondary_opts)}
    assert own >= EVERY
    assert {name for name, _, _ in matches} - own == {"help", "version"}
    for name, optional, needed in matches:
        if name in EVERY and (optional or needed):
            assert name in (WITH_OPTIONAL_VALUE if optional else WITH_VALUE)
