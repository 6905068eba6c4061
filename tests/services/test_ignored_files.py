"""Files that git ignores are not copied to a remote cluster; submit and diagnose report them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtslurm.model.jobs.job import JobRecord
from dtslurm.model.runs.diagnosis import EvidenceLine, Verdict
from dtslurm.services.request.ignored_files import explain_missing_file, mention_notices
from dtslurm.services.request.request import JobRequest
from dtslurm.store.git_tree import GitTree
from dtslurm.store.snapshot import take
from tests.store.trees import HERE, git, write

IGNORED = "data/\n*.pt\nnotes.txt\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    write(folder, {".gitignore": IGNORED, "train.py": "pass", "sub/other.py": "pass", "mixed/kept": "x"})
    write(folder, {"data/a.csv": "x", "data/deep/b.csv": "x", "mixed/w.pt": "x", "notes.txt": "x"})
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    return folder


def notices(
    tree: Path,
    source: str = "",
    script: str = "train.py",
    args: Sequence[str] = (),
    include: Sequence[str] = (),
) -> list[str]:
    (tree / script).write_text(source)
    snapshot = take(HERE, (tree / script).parent, include=include, hash_cache=tree.parent / "digests")
    request = JobRequest(script=Path(script).name, args=tuple(args))
    return mention_notices((tree / script).parent, request, snapshot, GitTree(HERE, tree).ignored())


@pytest.mark.parametrize(
    ("source", "args", "named"),
    [
        ("open('data/a.csv')", (), "data/a.csv"),
        ("from pathlib import Path\nPath('data') / 'a.csv'", (), "data/"),
        ("open(f'data/deep/{name}.csv')", (), "data/deep/"),
        ("", ("--data=./data/deep/b.csv",), "data/deep/b.csv"),
        ("", ("data.path=data",), "data/"),
        ("torch.load('mixed/w.pt')", (), "mixed/w.pt"),
        ("", ("--weights", "mixed"), "mixed/w.pt"),
    ],
)
def test_ignored_files_that_a_script_mentions_are_listed(
    tree: Path, source: str, args: tuple[str, ...], named: str
) -> None:
    [result] = notices(tree, source, args=args)
    assert result.startswith(f"git ignores {named}, which train.py or its arguments name: the job")
    assert f"--code-include {named} copies them with the code" in result
    assert notices(tree, source, args=args, include=[named]) == []


@pytest.mark.parametrize(
    ("mentioned", "included"),
    [
        (("mixed", "w.pt"), ["mixed/", "w.pt"]),
        (("mixed", "new", "w.pt"), ["mixed/", "new/", "w.pt"]),
        (("many",), ["many/"]),
        (("many/0", "many/1", "many/2", "many/3"), ["many/"]),
        (("many/0", "many/1", "many/2"), ["many/0/w x.pt", "many/1/w x.pt", "many/2/w x.pt"]),
    ],
)
def test_the_options_of_the_warning_copy_all_files_even_if_it_lists_only_some(
    tree: Path, mentioned: tuple[str, ...], included: list[str]
) -> None:
    write(tree, {f"{folder}/{number}.pt": "x" for folder in ("mixed", "new") for number in range(3)})
    write(tree, {f"many/{number}/{name}": "x" for number in range(9) for name in ("w x.pt", "kept")})
    write(tree, {"w.pt": "x"})
    git(tree, "add", "-A")
    [result] = notices(tree, args=mentioned)
    options = shlex.split(result.partition("; ")[2].partition(" copies them")[0])
    assert options == [word for path in included for word in ("--code-include", path)]
    assert notices(tree, args=mentioned, include=included) == []


@pytest.mark.parametrize(
    ("source", "args"),
    [
        ("print('notes', 'dat', 'data2', '.', '', '..')", ()),
        ("open('/abs/data/a.csv')", ()),
        ("open('data/made_later.csv', 'w')", ()),
        ("x = 'mixed/kept'", ("sub/other.py", "../outside")),
    ],
)
def test_committed_missing_and_absolute_paths_are_not_listed(
    tree: Path, source: str, args: tuple[str, ...]
) -> None:
    assert notices(tree, source, args=args) == []


def test_paths_in_a_script_are_relative_to_the_submission_folder(tree: Path) -> None:
    [result] = notices(tree, "open('../data/a.csv')", "sub/other.py")
    assert result.startswith("git ignores data/a.csv, which other.py")


def record(tmp_path: Path, tree: Path, inside: str = "") -> JobRecord:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    folder = tree / inside
    (mirror / "job.json").write_text(f'{{"schema": 1, "submitted_in": "{folder}"}}')
    return JobRecord(
        token="ab12", cluster="far", name="train", run_dir="/scratch/run", mirror=str(mirror),
        phase="submitted", created_at=1.0, work_dir=f"/scratch/run/code{'/' if inside else ''}{inside}",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("inside", "missing", "named"),
    [
        ("", "data/a.csv", "data/a.csv"),
        ("", "/scratch/run/code/data/a.csv", "data/a.csv"),
        ("sub", "../data/a.csv", "data/a.csv"),
        ("", "data/nowhere.csv", None),
        ("", "/datasets/a.csv", None),
        ("", "../../outside.csv", None),
    ],
)
def test_diagnose_explains_a_missing_file_that_git_ignores(
    tmp_path: Path, tree: Path, inside: str, missing: str, named: str | None
) -> None:
    text = f"FileNotFoundError: [Errno 2] No such file or directory: '{missing}'"
    line = EvidenceLine(rank=0, file="rank-0.log", line=9, text=text)
    verdict = Verdict(cause="exception", summary=text, blame="code", advice="see train.py", evidence=(line,))
    missing_file = explain_missing_file(record(tmp_path, tree, inside), verdict)
    if named is None:
        assert missing_file == verdict
        return
    assert missing_file.blame == "user"
    assert f"{tree / named} was not copied with the code" in missing_file.summary
    assert f"--code-include {named}" in missing_file.advice
    assert "--stage" in missing_file.advice
