"""``dtslurm cluster discover`` and ``cluster check``: output, written profiles and kept edits."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.slurm_programs import Programs
from tests.discover.answers import PARTITIONS

DISCOVER = ("cluster", "discover", "--no-probe")
CHECK = ("cluster", "check", "lab", "--no-probe", "-l", "srun", "--json")
DRY_RUN = "partition main, sbatch --test-only"
FILE = ("-o", "cluster_profiles/lab.yaml")


@pytest.fixture
def profile_path(folder: Path) -> Path:
    return folder / "cluster_profiles" / "lab.yaml"


def raise_time_limit(slurm: Programs) -> None:
    """Let Slurm report a longer time limit of the partition."""
    slurm.say("scontrol -o show partition", PARTITIONS.replace("MaxTime=1-00:00:00", "MaxTime=2-00:00:00"))


def test_discover_prints_a_profile_to_stdout(invoke: Run, slurm: Programs) -> None:
    done = invoke(*DISCOVER, code=0)
    assert re.search(r"^node_types:\n", done.stdout, re.MULTILINE)
    assert re.search(r"max_time: .?1-00:00:00", done.stdout)
    assert "save the profile: dtslurm cluster discover -o cluster_profiles/lab.yaml" in done.stderr
    assert not any(line.startswith("sbatch --parsable") for line in slurm.asked)


@pytest.mark.usefixtures("slurm")
def test_discover_json_contains_the_facts(invoke: Run) -> None:
    document = json.loads(invoke(*DISCOVER, "--json", code=0).stdout)
    assert (document["name"], document["nodes"], document["node_types"]) == ("lab", 2, {"gpu-a100x8": 2})
    assert {fact["key"] for fact in document["facts"]} >= {"slurm.version", "slurm.partition"}
    assert (document["path"], document["written"], document["probes"]) == (None, False, [])


def test_discover_finds_no_new_values_in_its_own_profile(
    invoke: Run, slurm: Programs, profile_path: Path
) -> None:
    del slurm
    wrote = invoke(*DISCOVER, *FILE, code=0)
    assert re.search(r"wrote .*lab\.yaml: \d+ values; verify it with dtslurm cluster check lab", wrote.stderr)
    assert wrote.stdout == ""
    text = profile_path.read_text()
    again = invoke(*DISCOVER, *FILE, code=0)
    assert "lab.yaml: no new values" in again.stderr
    assert profile_path.read_text() == text


@pytest.mark.usefixtures("slurm")
def test_discover_writes_a_profile_into_the_folder_above(
    invoke: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sub" / "cluster profiles").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.chdir(folder / "sub")
    monkeypatch.delenv("DTSLURM_TRUSTED_FOLDERS", raising=False)
    for name, path, found_by in (
        ("../cluster_profiles/lab.yaml", folder / "cluster_profiles/lab.yaml", None),
        ("./cluster_profiles/lab.yaml", folder / "sub/cluster_profiles/lab.yaml", "lab"),
        ("cluster profiles/lab.yaml", folder / "sub/cluster profiles/lab.yaml", None),
        ("~/lab.yaml", folder / "home/lab.yaml", None),
    ):
        argument = found_by or shlex.quote(str(path))
        done = invoke(*DISCOVER, "-o", name, code=0)
        assert re.search(
            f"wrote {path}: \\d+ values; verify it with dtslurm cluster check {argument}\n", done.stderr
        )
        invoke("cluster", "check", *shlex.split(argument), "--no-probe", "-l", "srun", code=0)
        assert f"{path}: no new values" in invoke(*DISCOVER, "-o", name, code=0).stderr


def test_discover_without_a_terminal_changes_a_profile_only_with_yes(
    invoke: Run, slurm: Programs, profile_path: Path
) -> None:
    invoke(*DISCOVER, *FILE, code=0)
    before = profile_path.read_text()
    raise_time_limit(slurm)
    done = invoke(*DISCOVER, *FILE, code=0)
    assert re.search(r"^-.*max_time: .?1-00:00:00", done.stderr, re.MULTILINE)
    assert re.search(r"^\+.*max_time: .?2-00:00:00", done.stderr, re.MULTILINE)
    assert "not written: there is no terminal for the confirmation; --yes confirms in advance" in done.stderr
    assert "lab.yaml was not changed" in done.stderr
    assert profile_path.read_text() == before
    document = json.loads(invoke(*DISCOVER, *FILE, "--json", code=0).stdout)
    assert (document["written"], document["path"]) == (False, str(profile_path))
    assert "changed 1 and added 0 values" in invoke(*DISCOVER, *FILE, "--yes", code=0).stderr
    assert "2-00:00:00" in profile_path.read_text()


@pytest.mark.parametrize(("said", "changed"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_discover_on_a_terminal_asks_before_a_change(
    invoke: Run,
    slurm: Programs,
    profile_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    changed: bool,
) -> None:
    invoke(*DISCOVER, *FILE, code=0)
    raise_time_limit(slurm)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _="": said.strip())
    done = invoke(*DISCOVER, *FILE, code=0)
    assert ("2-00:00:00" in profile_path.read_text()) is changed
    assert ("lab.yaml was not changed" in done.stderr) is not changed


def test_discover_keeps_values_that_were_edited(invoke: Run, slurm: Programs, profile_path: Path) -> None:
    del slurm
    invoke(*DISCOVER, *FILE, code=0)
    profile_path.write_text(profile_path.read_text().replace("1-00:00:00", "0-12:00:00"))
    done = invoke(*DISCOVER, *FILE, "--yes", code=0)
    assert "your value is kept: slurm.partitions.main.max_time is 0-12:00:00, found 1-00:00:00" in done.stderr
    assert "0-12:00:00" in profile_path.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("login1", "--cluster", "a100x8-ib"), "give HOST or --cluster, not both"),
        (("--cluster", "local"), "cluster local is this machine without Slurm; see dtslurm doctor"),
        (("-o", "lab.txt"), "lab.txt: the file name of a profile must end in .yaml"),
        (("-o", "."), "is a folder; name a file, such as ./mycluster.yaml"),
        (("-p", "gpu"), "there is no partition gpu; available: main"),
    ],
)
@pytest.mark.usefixtures("slurm")
def test_discover_refuses_invalid_arguments(invoke: Run, words: tuple[str, ...], message: str) -> None:
    done = invoke(*DISCOVER, *words, code=2)
    assert message in done.stderr
    assert done.stdout == ""


def test_discover_reports_a_slurm_that_does_not_answer(invoke: Run, slurm: Programs) -> None:
    for command in ("scontrol show config", "scontrol -o show partition", "scontrol -o show node"):
        slurm.say(command, "slurm_load error: Unable to contact slurm controller\n", code=1)
    done = invoke(*DISCOVER, code=3)
    assert "reported no nodes, no partitions and no configuration" in done.stderr
    assert "Unable to contact slurm controller" in done.stderr


def test_discover_writes_a_profile_although_probes_were_refused(invoke: Run, slurm: Programs) -> None:
    slurm.say("sbatch --parsable", "sbatch: error: Invalid account\n", code=1)
    done = invoke("cluster", "discover", "--account", "mine", "--qos", "high", code=0)
    assert "notice: the probe of gpu-a100x8 failed: " in done.stderr
    assert "node_types:" in done.stdout


# ---- cluster check ----


def test_cluster_check_confirms_a_correct_profile(invoke: Run, slurm: Programs) -> None:
    invoke(*DISCOVER, *FILE, code=0)
    slurm.say("sbatch --test-only", "sbatch: Job 1 to start at 2026-01-01T00:00:00\n")
    done = invoke("cluster", "check", "lab", "--no-probe", "-l", "srun", code=0)
    assert done.stdout.splitlines()[0].split() == ["VERDICT", "WHAT", "CLAIM", "FOUND"]
    assert "differs" not in done.stdout
    assert re.search(r"\d+ ok, 0 differs, \d+ unknown", done.stderr)
    document = json.loads(
        invoke("cluster", "check", "lab", "--no-probe", "-l", "srun", "--json", code=0).stdout
    )
    assert (document["ok"], document["cluster"], document["probes"]) == (True, "lab", [])


def test_cluster_check_submits_dry_runs_for_partitions_and_other_node_types(
    invoke: Run, slurm: Programs, profile_path: Path
) -> None:
    invoke(*DISCOVER, *FILE, code=0)
    slurm.say("sbatch --test-only", "sbatch: Job 1 to start at 2026-01-01T00:00:00\n")
    profile_path.write_text(
        profile_path.read_text().replace("node_types:\n", "node_types:\n  rare: {cpus: 2, partition: main}\n")
    )
    done = invoke("cluster", "check", "lab", "--no-probe", "-l", "srun", "-l", "torchrun", code=None)
    tried = [line for line in done.stdout.splitlines() if "--test-only" in line]
    assert [line.split(",")[0].split()[1:] for line in tried] == [
        ["partition", "main"],
        ["node", "type", "rare"],
    ]


def test_cluster_check_exits_with_1_for_a_wrong_value(
    invoke: Run, slurm: Programs, profile_path: Path
) -> None:
    invoke(*DISCOVER, *FILE, code=0)
    slurm.say("sbatch --test-only", "sbatch: error: Batch job submission failed: Invalid qos\n", code=1)
    profile_path.write_text(profile_path.read_text().replace("count: 8", "count: 4"))
    done = invoke("cluster", "check", "lab", "--no-probe", "-l", "srun", "-p", "main", code=1)
    first = done.stdout.splitlines()[1]
    assert first.startswith("differs")
    assert "Invalid qos" in done.stdout


NO_NODES = "allocation failure: Requested node configuration is not available"


@pytest.mark.parametrize(
    ("listed", "verdict", "text"),
    [
        ("n1|main*|idle|(null)\n", "differs", f"{NO_NODES}, although all of its nodes are up"),
        ("n1|main*|idle|(null)\nn2|main*|drain|(null)\n", "unknown", NO_NODES),
        ("n1|main*|idle*|(null)\n", "unknown", NO_NODES),
        ("", "unknown", NO_NODES),
    ],
)
def test_an_unavailable_node_configuration_is_wrong_only_if_all_nodes_are_up(
    invoke: Run, slurm: Programs, listed: str, verdict: str, text: str
) -> None:
    invoke(*DISCOVER, *FILE, code=0)
    slurm.say("sbatch --test-only", f"{NO_NODES}\n", code=1)
    slurm.say("sinfo", listed, code=int(not listed))
    done = invoke(*CHECK, code=int(verdict == "differs"))
    assert [row["found"] for row in claim_rows(done.stdout, DRY_RUN, verdict)] == [text]


def test_cluster_check_does_not_require_two_nodes_in_a_partition(invoke: Run, slurm: Programs) -> None:
    invoke(*DISCOVER, *FILE, code=0)
    slurm.do("sbatch --test-only", f"grep -q nodes=1 && exit 0; echo '{NO_NODES}'; exit 1")
    assert len(claim_rows(invoke(*CHECK, code=0).stdout, DRY_RUN, "unknown")) == 1


@pytest.mark.parametrize(
    ("name", "verdict", "text"),
    [
        ("torchrn", "differs", "unknown launcher; did you mean 'torchrun'?"),
        ("torchrun", "ok", "available"),
        ("auto", "ok", "available"),
    ],
)
def test_cluster_check_verifies_the_default_launcher(
    invoke: Run, slurm: Programs, profile_path: Path, name: str, verdict: str, text: str
) -> None:
    invoke(*DISCOVER, *FILE, code=0)
    slurm.say("sbatch --test-only", "sbatch: Job 1 to start at 2026-01-01T00:00:00\n")
    profile_path.write_text(f"{profile_path.read_text()}\ndefault_launcher: {name}\n")
    done = invoke(*CHECK, code=int(verdict == "differs"))
    assert [row["found"] for row in claim_rows(done.stdout, "default_launcher", verdict)] == [text]


def claim_rows(printed: str, what: str, verdict: str) -> list[dict[str, str]]:
    claims = json.loads(printed)["claims"]
    return [row for row in claims if (row["what"], row["verdict"]) == (what, verdict)]


@pytest.mark.usefixtures("slurm")
def test_cluster_check_refuses_local_clusters_and_unknown_launchers(invoke: Run) -> None:
    assert "without Slurm" in invoke("cluster", "check", "local", code=2).stderr
    assert "did you mean 'srun'" in invoke("cluster", "check", "a100x8-ib", "-l", "srum", code=2).stderr
