"""Staging problems that are reported before submission."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dtslurm.errors import RequestInvalid
from dtslurm.services.request import staging
from dtslurm.services.request.request import JobRequest
from dtslurm.services.submit.prepare import prepare
from dtslurm.services.wiring.context import Context

PROFILE = """\
scheduler: slurm
default_node_type: small
node_types:
  small:
    cpus: 4
    local_disk:
      path: $TMPDIR
      size: {size}
      flag: --gres=nvme:100
"""


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    (tmp_path / "project" / "cluster_profiles").mkdir(parents=True)
    (tmp_path / "project" / "train.py").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.bin").write_bytes(b"x" * (3 << 20))
    monkeypatch.setenv("DTSLURM_LOCAL_STATE", str(tmp_path / "local"))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text("#!/bin/sh\n")  # only its being there counts
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return Context(cwd=tmp_path / "project")


def staging_request(context: Context, size: str = "100G", **options: object) -> JobRequest:
    (context.cwd / "cluster_profiles" / "lab.yaml").write_text(PROFILE.format(size=size))
    return replace(JobRequest(script="train.py", cluster="lab", no_check=True), **options)  # type: ignore[arg-type]


def refusal_text(context: Context, request: JobRequest) -> str:
    with pytest.raises(RequestInvalid) as caught:
        prepare(context, request, standalone=False)
    return "\n".join(caught.value.problems)


def test_the_staging_destination_is_the_local_disk_of_the_profile(context: Context, tmp_path: Path) -> None:
    prepared = prepare(context, staging_request(context, stage_in=(f"{tmp_path}/data",)), standalone=False)
    assert 'export DTSLURM_STAGED_DATA="$TMPDIR/data"' in prepared.submission.script
    assert any("--gres=nvme:100" in line for line in prepared.submission.notices)
    granted = staging_request(context, stage_in=(f"{tmp_path}/data",), sbatch=("--gres=nvme:200",))
    notices = prepare(context, granted, standalone=False).submission.notices
    assert not any("nvme" in line for line in notices)


def test_data_that_exceed_the_local_disk_are_reported(context: Context, tmp_path: Path) -> None:
    request = staging_request(context, "2M", stage_in=(f"{tmp_path}/data",))
    prepared = prepare(context, request, standalone=False)
    [result] = staging.sizes(prepared.cluster, prepared.submission.spec)
    assert "3.0 MiB do not fit on $TMPDIR, which has 2.0 MiB" in result


def test_a_missing_staging_source_is_reported(context: Context, tmp_path: Path) -> None:
    prepared = prepare(context, staging_request(context, stage_in=(f"{tmp_path}/dta",)), standalone=False)
    [result] = staging.sizes(prepared.cluster, prepared.submission.spec)
    assert f"{tmp_path}/dta does not exist on lab" in result


def test_all_staging_problems_are_reported_together(context: Context, tmp_path: Path) -> None:
    texts = (f"{tmp_path}/data:x", f"{tmp_path}/data:/a/d", "/b/data:/b/d", "/c:/d:shards=gpu")
    result = refusal_text(context, staging_request(context, stage_in=texts, stage_out=("results",)))
    assert result.count("--stage ") == 3
    assert "also has the name data" in result
    assert "--stage-out results" in result


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("/s1:$TMPDIR/same", "/s2:${TMPDIR}/same"), "$TMPDIR/same, the destination of /s1"),
        (("/s1:/tmp/same", "/s2:/tmp//same/."), "/tmp/same, the destination of /s1"),
        (("/s1:/tmp/a", "/s2:/tmp/a/b"), "/tmp/a, the destination of /s1"),
        (("/s1:/tmp/a/b", "/s2:/tmp/a"), "/tmp/a/b, the destination of /s1"),
        (("/src:/src/x",), "/src/x and the source /src"),
        (("/src/x:/src",), "/src and the source /src/x"),
        (("/src:/src/:name=again",), "/src/src and the source /src"),
        (("/s1:/a", "/a/b:/c"), "/a and the source /a/b"),
        (("/a/b:/c", "/s1:/a"), "/a and the source /a/b"),
    ],
)
def test_equal_or_nested_staging_paths_are_refused(
    context: Context, texts: tuple[str, ...], message: str
) -> None:
    assert message in refusal_text(context, staging_request(context, stage_in=texts))


def test_two_results_with_the_same_destination_are_refused(context: Context) -> None:
    result = refusal_text(context, staging_request(context, stage_out=("$TMPDIR/a:out", "$TMPDIR/b:out")))
    assert "--stage-out $TMPDIR/b:out: $TMPDIR/a is also copied to out" in result


def test_separate_staging_destinations_are_accepted(context: Context, tmp_path: Path) -> None:
    texts = (f"{tmp_path}/data:$TMPDIR/a", f"{tmp_path}/data/x.bin:$TMPDIR/ab")
    outs = ("$TMPDIR/a:out", "$TMPDIR/b:out/b")
    prepare(context, staging_request(context, stage_in=texts, stage_out=outs), standalone=False)


def test_method_unpack_of_a_folder_is_reported(context: Context, tmp_path: Path) -> None:
    request = staging_request(context, stage_in=(f"{tmp_path}/data::method=unpack", f"{tmp_path}/data/x.bin"))
    prepared = prepare(context, request, standalone=False)
    [result] = staging.sizes(prepared.cluster, prepared.submission.spec)
    assert result.endswith("data is a folder on lab; method=unpack needs an archive file")


def test_a_standalone_script_stages_data_with_shell_commands(context: Context, tmp_path: Path) -> None:
    request = staging_request(context, stage_in=(f"{tmp_path}/data",), stage_out=("$TMPDIR/out",))
    prepared = prepare(context, request, standalone=True)
    assert f'stage {tmp_path}/data "$TMPDIR/data"' in prepared.submission.script
    assert "/staging in" not in prepared.submission.script
    assert any("plain sbatch" in line for line in prepared.submission.notices)


def test_a_standalone_script_copies_results_back_repeatedly_without_loss(
    context: Context, tmp_path: Path
) -> None:
    out, run = tmp_path / "local" / "out", tmp_path / "run dir"
    request = staging_request(context, stage_out=("$PLACE/out:back", "$PLACE/out/a.txt:one"))
    script = prepare(context, request, standalone=True).submission.script
    program = script.partition("results.sh\" <<'END' || exit\n")[2].partition("\nEND\n")[0]
    env = {**os.environ, "PLACE": str(out.parent), "DTSLURM_RUN_DIR": str(run), "SLURM_NODEID": "0"}

    def bring() -> int:
        return subprocess.run(["bash", "-c", program], env=env, check=False).returncode

    assert bring() == 0  # there is nothing yet
    (out / "deep er").mkdir(parents=True)
    for text in ("first", "second"):
        (out / "a.txt").write_text(text)
        (out / "deep er" / "-b 'c'").write_text(text)
        assert bring() == 0
        there = {str(path.relative_to(run)): path.read_text() for path in run.rglob("*") if path.is_file()}
        names = ["back/node-0/a.txt", "back/node-0/deep er/-b 'c'", "one/node-0/a.txt"]
        assert there == dict.fromkeys(names, text)
    (run / "back" / "node-0" / "deep er" / "-b 'c'").unlink()
    (run / "back" / "node-0" / "deep er" / "-b 'c'" / "in the way").mkdir(parents=True)
    assert bring() != 0
    assert (run / "back" / "node-0.part" / "deep er" / "-b 'c'").read_text() == "second"  # nothing is lost
