"""The files of a snapshot, and its notices and problems."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtslurm.store import snapshot as snapshots
from dtslurm.store.hash_cache import HashCache, stamp
from dtslurm.store.ignore_rules import is_made, is_secret
from tests.store.trees import git, names, repository, snap, write

AS_ROOT = os.geteuid() == 0


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return repository(
        tmp_path / "tree", {"train.py": "print(1)\n", "lib/a.py": "", ".gitignore": "out/\n*.log\n"}
    )


def test_a_snapshot_contains_tracked_and_untracked_but_no_ignored_files(tree: Path) -> None:
    write(tree, {"new.py": "x", "out/big.bin": "x", "lib/run.log": "x"})
    (tree / "lib" / "a.py").unlink()
    assert names(snap(tree)) == {"train.py", "new.py", ".gitignore"}


def test_a_snapshot_of_a_subfolder_contains_the_whole_work_tree(tree: Path) -> None:
    result = snap(tree / "lib")
    assert (result.root, result.inside) == (tree, "lib")
    assert "train.py" in names(result)
    assert result.holds(Path("a.py"))
    assert result.holds(Path("../train.py"))
    assert result.holds(tree / "train.py")
    assert not result.holds(Path("train.py"))


def test_objects_are_named_by_digest_and_mode(tree: Path) -> None:
    (tree / "train.py").chmod(0o755)
    [file] = [file for file in snap(tree).files if file.path == "train.py"]
    assert file.digest == hashlib.sha256(b"print(1)\n").hexdigest()[:32]
    assert (file.executable, file.size, file.key) == (True, 9, file.digest + "x")


def test_a_snapshot_records_the_git_state(tree: Path) -> None:
    clean = snap(tree).git
    assert clean is not None
    assert (clean.branch, clean.dirty, clean.diff) == ("main", False, b"")
    (tree / "train.py").write_text("print(2)\n")
    dirty = snap(tree).git
    assert dirty is not None
    assert dirty.commit == clean.commit
    assert dirty.dirty
    assert b"+print(2)" in dirty.diff
    git(tree, "checkout", "-q", "--detach")
    detached = snap(tree).git
    assert detached is not None
    assert detached.branch is None


def test_a_very_large_diff_is_truncated(tree: Path) -> None:
    (tree / "train.py").write_text("x\n" * 2_000_000)
    state = snap(tree).git
    assert state is not None
    assert state.diff_cut
    assert len(state.diff) == 1 << 20


def test_a_work_tree_without_a_commit_can_be_snapshotted(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    git(tmp_path / "tree", "init", "-q")
    write(tmp_path / "tree", {"a.py": "x"})
    result = snap(tmp_path / "tree")
    assert names(result) == {"a.py"}
    assert result.git is not None
    assert result.git.commit is None


def test_c24_secrets_are_excluded_from_files_and_diff(tree: Path) -> None:
    secret = {
        ".env": "K=canary", "conf/.env.production": "K=canary", "key.pem": "canary", "id_rsa": "canary",
        "sub/.netrc": "canary", ".git-credentials": "canary", ".ssh/config": "canary", "ID_ED25519": "canary",
        "notes.txt": "-----BEGIN OPENSSH PRIVATE KEY-----\ncanary\n",
    }  # fmt: skip
    write(tree, {**secret, "id_rsa.pub": "public", ".env.example": "K="})
    git(tree, "add", "-A", "-f")
    write(tree, {name: f"{content} canary 2\n" for name, content in secret.items()})
    for _ in range(2):  # the second time from the cache
        result = snap(tree)
        assert not names(result) & secret.keys()
        assert names(result) >= {"id_rsa.pub", ".env.example"}
    shown = next(line for line in result.notices if "secrets" in line)
    assert ".env" in shown
    assert result.git is not None
    assert result.git.dirty
    assert b"canary" not in result.git.diff


def test_c24_a_secret_is_included_only_if_named_exactly(tree: Path) -> None:
    write(tree, {".env": "K=1", "notes.txt": "-----BEGIN PRIVATE KEY-----\n"})
    assert not {".env", "notes.txt"} & names(snap(tree, include=["*", ".e*"]))
    result = snap(tree, include=[".env", "/notes.txt"])
    assert {".env", "notes.txt"} <= names(result)
    assert {file.digest[:1] for file in result.files} <= set("0123456789abcdef")


RUN = {"job.json": "{}", "script.sbatch": "", "secrets": "export TOKEN=hush\n", "checkpoints/a.bin": "x"}


def add_run_directories(tree: Path) -> None:
    """Add two fetched run directories, and folders that only resemble a run directory."""
    for place in ("got", "lib/runs/got 2"):
        write(tree, {f"{place}/{name}": text for name, text in RUN.items()})
    write(tree, {"half/job.json": "", "half/secrets": "", "lib/secrets": ""})


@pytest.mark.parametrize("in_git", [True, False])
def test_c24_run_directories_are_excluded_from_a_snapshot(tree: Path, in_git: bool) -> None:
    add_run_directories(tree)
    if not in_git:
        shutil.rmtree(tree / ".git")
    taken = {name for name in names(snap(tree)) if "job.json" in name or "a.bin" in name or "secrets" in name}
    assert taken == {"half/job.json", "half/secrets", "lib/secrets"}
    assert set(snap(tree).runs) == {"got", "lib/runs/got 2"}
    assert any("run directories (--code-include" in line for line in snap(tree).notices)


@pytest.mark.parametrize("in_git", [True, False])
def test_c24_an_included_run_directory_excludes_its_secrets(tree: Path, in_git: bool) -> None:
    add_run_directories(tree)
    if not in_git:
        shutil.rmtree(tree / ".git")
    assert {"got/job.json", "got/checkpoints/a.bin"} <= names(snap(tree, include=["got/"]))
    assert "got/secrets" not in names(snap(tree, include=["got/"]))
    assert snap(tree, include=["got/"]).runs == ("lib/runs/got 2",)
    assert "got/secrets" in names(snap(tree, include=["got/secrets"]))


def test_c24_a_run_directory_that_contains_the_working_folder_is_code(tree: Path) -> None:
    write(tree, {f"exp/{name}": text for name, text in RUN.items()})
    write(tree, RUN)  # fetched into the top of the tree
    write(tree, {"exp/code/train.py": ""})
    result = snap(tree / "exp" / "code")
    assert {"exp/code/train.py", "exp/job.json", "job.json", "train.py"} <= names(result)
    assert not {"exp/secrets", "secrets"} & names(result)
    assert result.runs == ()


def test_c24_run_directories_in_nested_repositories_are_excluded(tree: Path) -> None:
    repository(tree / "other", {"a.py": "", **{f"got/{name}": text for name, text in RUN.items()}})
    assert {name for name in names(snap(tree)) if name.startswith("other/")} == {"other/a.py"}


def test_patterns_include_ignored_files_and_exclude_others(tree: Path) -> None:
    write(tree, {"out/model.so": "x", "out/other": "x", "docs/a.md": "x", "docs/b.py": "x"})
    result = snap(tree, include=["out/*.so"], exclude=["*.md", "lib/"])
    assert names(result) == {"train.py", ".gitignore", "out/model.so", "docs/b.py"}


def test_submodules_and_cloned_repositories_are_included(tmp_path: Path, tree: Path) -> None:
    inner = repository(tmp_path / "inner", {"inner.py": "x", "deep/i.py": "y"})
    git(tree, "submodule", "add", "-q", str(inner), "third/inner")
    git(tree, "commit", "-q", "-m", "submodule")
    git(tree, "clone", "-q", str(inner), "cloned")
    git(tree, "worktree", "add", "-q", "wt")
    write(tree / "third" / "inner", {"untracked.py": "z"})
    result = names(snap(tree))
    assert {
        "third/inner/inner.py",
        "third/inner/deep/i.py",
        "third/inner/untracked.py",
        "cloned/inner.py",
    } <= result
    assert not [path for path in result if path.startswith("wt/")]


def test_outside_git_generated_files_are_excluded(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    made = {".venv/bin/x": "", "__pycache__/a.pyc": "", "node_modules/m.js": "", "last.ckpt": "", "m.pt": ""}
    write(folder, {"train.py": "x", "sub/b.py": "", **made})
    result = snap(folder)
    assert names(result) == {"train.py", "sub/b.py"}
    assert (result.root, result.inside, result.git) == (folder, "", None)
    assert names(snap(folder, include=["*.pt"])) == {"train.py", "sub/b.py", "m.pt"}


def test_a_folder_ignored_by_its_work_tree_is_snapshotted_alone(tree: Path) -> None:
    write(tree, {"out/run1/train.py": "x"})
    result = snap(tree / "out" / "run1")
    assert (names(result), result.root) == ({"train.py"}, tree / "out" / "run1")


def test_an_empty_folder_is_reported_as_a_problem(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no files for the snapshot" in snap(tmp_path / "empty").problems[0]


def test_too_many_or_large_files_outside_git_are_reported_with_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plain"
    write(folder, {"data/a": "x" * 3000, "train.py": "x"})
    monkeypatch.setattr(snapshots, "LIMIT_OUTSIDE", (100, 2000))
    [problem] = snap(folder).problems
    assert "data (2.9 KiB)" in problem
    assert "exclude" in problem
    assert names(snap(folder, exclude=["data/"])) == {"train.py"}
    monkeypatch.setattr(snapshots, "LIMIT_OUTSIDE", (1, 10**9))
    assert snap(folder).problems


def test_a_repository_that_git_rejects_is_reported_with_the_git_message(tree: Path) -> None:
    (tree / ".git" / "HEAD").write_text("broken")
    [problem] = snap(tree).problems
    assert "git" in problem
    assert "HEAD" in problem or "not a git repository" in problem


def test_special_and_unreadable_files_are_listed_and_excluded(tree: Path) -> None:
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(tree)
        try:
            server.bind("sock")
        finally:
            os.chdir(here)
    expected = {"fifo", "sock"}
    if AS_ROOT:
        os.mknod(tree / "device", 0o600 | 0o020000, os.makedev(1, 3))
        expected.add("device")
    write(tree, {"mine.txt": "x"})
    (tree / "mine.txt").chmod(0)
    for result in (snap(tree), snapshot_outside_git(tree)):
        assert not names(result) & expected
        assert ("mine.txt" in names(result)) == AS_ROOT


def snapshot_outside_git(tree: Path) -> snapshots.Snapshot:
    target = tree.parent / "outside"
    if not target.exists():
        target.mkdir()
        os.mkfifo(target / "fifo")
        write(target, {"a.py": "x", "mine.txt": "x"})
        (target / "mine.txt").chmod(0)
    result = snap(target)
    assert any("neither files nor links: fifo" in line for line in result.notices)
    return result


def test_large_files_are_listed(tree: Path) -> None:
    with (tree / "weights.bin").open("wb") as file:
        file.truncate(51_000_000)
    assert any("large" in line and "weights.bin (48.6 MiB)" in line for line in snap(tree).notices)


def test_links_are_kept_and_lead_to_the_same_target(tmp_path: Path, tree: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, target in {
        "inside": "lib/a.py", "loop": "loop", "absolute": str(tree / "train.py"), "up": "../data",
        "far": "/scratch/none", "lib/round": "..",
    }.items():  # fmt: skip
        (tree / name).symlink_to(target)
    result = snap(tree)
    links = {file.path: file.target for file in result.files if file.target is not None}
    assert links == {
        "inside": "lib/a.py", "loop": "loop", "absolute": "train.py", "up": str(tmp_path / "data"),
        "far": "/scratch/none", "lib/round": "..",
    }  # fmt: skip
    [line] = [line for line in result.notices if "outside the tree" in line]
    assert "up -> " in line
    assert "far -> " in line


def test_a_tracked_folder_replaced_by_a_link_is_a_link(tmp_path: Path, tree: Path) -> None:
    (tree / "lib" / "a.py").unlink()
    (tree / "lib").rmdir()
    write(tmp_path / "elsewhere", {"a.py": "other"})
    (tree / "lib").symlink_to(tmp_path / "elsewhere")
    result = snap(tree)
    assert "lib" in names(result)
    assert "lib/a.py" not in names(result)


def test_file_names_may_contain_any_bytes(tree: Path) -> None:
    odd = [b"caf\xe9.py", "ünïcode ☃".encode(), b"new\nline", b"-rf", b"tab\there", b"a'b\"c$d`e", b" ", b"*"]
    for name in odd:
        (tree / os.fsdecode(name)).write_text("x")
    for result in (snap(tree), snap(tree, exclude=["nothing"])):
        assert {os.fsencode(path) for path in names(result)} >= set(odd)


names_of_files = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20
).filter(lambda name: name not in {".", ".."} and len(name.encode()) < 200)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names_of_files, st.binary(max_size=50), min_size=1, max_size=8))
def test_arbitrary_files_are_included_with_their_content(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    write(folder / "tree", {f"d/{name}": content for name, content in files.items()})
    result = {file.path: file.digest for file in snap(folder / "tree").files}
    for name, content in files.items():
        path = f"d/{name}"
        if path in result:
            assert result[path] == hashlib.sha256(content).hexdigest()[:32]
        else:
            assert is_made(path) or is_secret(path)


def test_an_unchanged_tree_is_not_read_again(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = time.time() - 100
    for path in tree.rglob("*.py"):
        os.utime(path, (old, old))
    monkeypatch.setattr("dtslurm.store.hash_cache._RACY_NS", 0)  # ctime is now, and cannot be set
    first = snap(tree)
    read: list[str] = []
    really = snapshots._read

    def counted(path: str) -> object:
        read.append(path)
        return really(path)

    monkeypatch.setattr(snapshots, "_read", counted)
    assert snap(tree) == first
    assert read == []
    (tree / "train.py").write_text("print(3)\n")
    assert snap(tree) != first
    assert read == [str(tree / "train.py")]


def test_a_file_changed_within_the_timestamp_resolution_is_read_again(tree: Path) -> None:
    first = snap(tree)
    times = (tree / "train.py").stat()
    (tree / "train.py").write_text("print(7)\n")  # same length
    os.utime(tree / "train.py", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert snap(tree) != first


def test_the_hash_of_a_recently_changed_file_is_not_cached(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    now = stamp((tmp_path / "f").stat())
    cache = HashCache(tmp_path / "cache", tmp_path)
    cache.put("f", now, "d", now[3] + 1)
    cache.put("g", now, "d", now[3] + 10**10)
    cache.save()
    again = HashCache(tmp_path / "cache", tmp_path)
    assert (again.get("f", now), again.get("g", now)) == (None, "d")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema":1,"root":"x","files":[]}', b"\xff\xfe"])
def test_a_malformed_hash_cache_is_ignored(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr("dtslurm.store.hash_cache._RACY_NS", 0)
    first = snap(tree)
    [path] = (tmp_path / "cache").glob("*.json")
    path.write_bytes(content)
    assert snap(tree) == first


def test_an_unwritable_hash_cache_is_ignored(tmp_path: Path, tree: Path) -> None:
    (tmp_path / "file").write_text("")
    assert names(snap(tree, tmp_path / "file" / "cache"))


def test_concurrent_snapshots_share_a_hash_cache(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtslurm.store.hash_cache._RACY_NS", 0)
    expected = snap(tree, tmp_path / "other")
    result: list[snapshots.Snapshot] = []
    threads = [threading.Thread(target=lambda: result.append(snap(tree))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == [expected] * 8
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".json"] == []


def test_a_file_that_vanishes_or_keeps_changing_does_not_stop_the_snapshot(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree, {"gone.py": "x", "log.txt": "x"})
    really = snapshots._digest

    def digest(read: object, size: int) -> str:
        (tree / "gone.py").unlink(missing_ok=True)
        with (tree / "log.txt").open("a") as file:
            file.write("more")
        return really(read, size)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshots, "_digest", digest)
    result = snap(tree)
    assert "train.py" in names(result)
    assert "log.txt" not in names(result)
    assert any("change continuously: log.txt" in line for line in result.notices)


def test_git_hook_variables_do_not_redirect_the_snapshot(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = repository(tmp_path / "other", {"other.py": "x"})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert "train.py" in names(snap(tree))


@pytest.mark.slow
def test_a_hundred_thousand_files_need_git_to_be_snapshotted(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for folder in range(100):
        (tree / f"f{folder}").mkdir(parents=True)
        first = tree / f"f{folder}" / "0.py"
        first.write_text(str(folder))
        for number in range(1, 1000):
            os.link(first, tree / f"f{folder}" / f"{number}.py")
    outside = snap(tree)
    assert outside.files == ()  # of no file was the content read
    assert "which is not in git" in outside.problems[0]
    git(tree, "init", "-q")
    inside = snap(tree)
    assert inside.problems == ()
    assert len(inside.files) == 100_000
    assert len({file.digest for file in inside.files}) == 100
