"""The packaged profiles: sources of their values, and rendered scripts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtslurm import assets
from dtslurm.config import profiles, provenance
from dtslurm.errors import ProfileNotFound
from dtslurm.launch import registry
from dtslurm.launch.layout import resolve
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.job import JobSpec, Resources
from dtslurm.model.units import Walltime
from dtslurm.render.engine import Templates
from dtslurm.render.script import RunPlace, Site, render

NAMES = sorted(path.stem for path in assets.cluster_profiles().glob("*.yaml"))
HERE = {"local", "slurm"}
OURS = {
    "name",
    "title",
    "checked",
    "sources",
    "extends",
    "default_node_type",
}  # words of our own, not of a site
GENERIC = {
    name for name in NAMES if "(build on it)" in (assets.cluster_profiles() / f"{name}.yaml").read_text()
}
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
LAUNCHERS = ("torchrun", "srun", "accelerate", "deepspeed", "lightning", "jax")


def load_profile(name: str) -> ClusterProfile:
    return profiles.load(name, cwd=Path("/"), env={}).profile


def render_script(profile: ClusterProfile, launcher_name: str) -> str:
    launcher = registry.load(launcher_name)
    resources = Resources(nodes=2, time=Walltime.parse("60"), gpus_per_node=None if profile.node_types else 4)
    spec = JobSpec(
        name="train",
        script="train.py",
        work_dir="/work",
        launcher=launcher_name,
        resources=resources,
    )
    layout = resolve(resources, profile).layout
    assert layout is not None
    place = RunPlace("/runs/train-1", "/runs/train-1/logs/batch.log", "0" * 12)
    site = Site(profile, Templates(folders=(assets.templates(),)))
    return render(spec, site, layout, launcher.chosen(spec), place).script


@pytest.mark.parametrize("name", [name for name in NAMES if name not in HERE])
def test_every_value_of_a_packaged_profile_has_a_dated_source(name: str) -> None:
    loaded = profiles.load(name, cwd=Path("/"), env={})
    assert loaded.profile.sources
    result = profiles.sources(name, cwd=Path("/"), env={})
    assert set(result) >= {key for key in loaded.origins if key.partition(".")[0] not in OURS}
    assert all(re.search(r", 20\d\d(-\d\d)?$", document) for document in result.values())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in HERE])
def test_every_source_line_is_parsed_and_names_existing_keys(name: str) -> None:
    text = (assets.cluster_profiles() / f"{name}.yaml").read_text()
    sources = provenance.read(text)
    assert len(sources) == text.count("source: "), "a line is not of the form that is read"
    assert [source.keys for source in sources].count(()) == 1, (
        "one stands for the whole file, the others name keys"
    )
    own = [key for key, place in profiles.load(name, cwd=Path("/"), env={}).origins.items() if name in place]
    for source in sources:
        for prefix in source.keys:
            assert any(key == prefix or key.startswith(f"{prefix}.") for key in own), prefix


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "local"])
def test_a_packaged_profile_renders_with_every_launcher(name: str, launcher: str) -> None:
    profile = load_profile(name)
    script = render_script(profile, launcher)
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    gpu_options = [line for line in lines if re.search(r"--(gres|gpus|gpus-per-\w+)=", line)]
    if profile.slurm.gpu_request in {"none", "constraint"}:
        assert gpu_options == []
    else:
        assert len(gpu_options) == 1
    assert "mem" not in script or profile.slurm.mem != "forbidden" or not re.search(r"#SBATCH --mem", script)
    assert "#SBATCH --time=01:00:00" in lines


@pytest.mark.parametrize("name", [name for name in NAMES if name != "local"])
def test_scripts_of_packaged_profiles_pass_shellcheck(name: str, tmp_path: Path) -> None:
    path = tmp_path / "script.sbatch"
    path.write_text(render_script(load_profile(name), "torchrun"))
    result = subprocess.run(
        [SHELLCHECK, "--shell=bash", "--exclude=SC1091", path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_there_are_profiles_of_at_least_forty_clusters() -> None:
    assert len(set(NAMES) - HERE - GENERIC) >= 40


def test_generic_profiles_cover_every_gpu_generation() -> None:
    models = {
        str(item.gpus.model)
        for name in GENERIC
        for item in load_profile(name).node_types.values()
        if item.gpus
    }
    for model in ("V100", "A100", "H100", "H200", "B200", "GB200", "MI250X", "MI300X", "Gaudi2"):
        assert any(item.startswith(model) for item in models), model


@pytest.mark.parametrize("name", ["polaris", "Gadi", "tsubame4"])
def test_a_known_cluster_without_slurm_is_reported(name: str) -> None:
    with pytest.raises(ProfileNotFound, match="not Slurm"):
        profiles.load(name, cwd=Path("/"), env={})


def test_a_decommissioned_cluster_is_reported_with_its_successor() -> None:
    with pytest.raises(ProfileNotFound, match=r"shut down .* roihu"):
        profiles.load("mahti", cwd=Path("/"), env={})


@pytest.mark.parametrize("name", [name for name in NAMES if name not in HERE])
def test_a_packaged_profile_states_the_source_and_date_of_its_check(name: str) -> None:
    text = (assets.cluster_profiles() / f"{name}.yaml").read_text()
    [date] = [source.date for source in provenance.read(text) if not source.keys]
    assert f"\nchecked: documentation {date}\n" in text
    assert load_profile(name).checked == f"documentation {date}"
