"""Submissions with fixed values for the comparison with golden scripts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtslurm import assets
from dtslurm.config import profiles
from dtslurm.container import registry as registry_of_runtimes
from dtslurm.launch import registry
from dtslurm.launch.layout import resolve
from dtslurm.model.cluster import ClusterProfile, ContainerRuntime
from dtslurm.model.jobs.job import JobSpec, Resources, Submission
from dtslurm.model.units import Walltime
from dtslurm.render.engine import Templates
from dtslurm.render.script import RunPlace, Site, render

Render = Callable[..., Submission]
PLACE = RunPlace("/scratch/me/runs/train-1", "/scratch/me/runs/train-1/logs/batch.log", "0123456789ab")


def load_profile(name: str) -> ClusterProfile:
    return profiles.load(name, cwd=Path("/nowhere"), env={"HOME": "/nowhere"}).profile


@pytest.fixture
def render_job() -> Render:
    """Render a job: profile name or value, launcher name, fields of Resources and JobSpec, and ``place``."""

    def make(profile: str | ClusterProfile, launcher_name: str, **asked: Any) -> Submission:
        cluster = load_profile(profile) if isinstance(profile, str) else profile
        folders = [*asked.pop("folders", []), assets.templates()]
        place = asked.pop("place", PLACE)
        runtime = None
        if "runtime" in asked:
            runtime = registry_of_runtimes.load(asked.pop("runtime"))
            cluster = replace(cluster, container=ContainerRuntime(runtime=runtime.name))
        resource_names = set(Resources.__dataclass_fields__)
        resources = Resources(
            **{
                "time": Walltime(3600),
                "account": "proj",
                **{key: value for key, value in asked.items() if key in resource_names},
            }
        )
        fields = {key: value for key, value in asked.items() if key not in resource_names}
        launcher = registry.load(launcher_name)
        resolution = resolve(resources, cluster, one_process=launcher.one_process)
        assert resolution.layout is not None, resolution.problems
        spec = JobSpec(
            **{
                "name": "train",
                "script": "train.py",
                "args": ("--config", "conf/base.yaml"),
                "work_dir": "/home/me/project",
                "python": "/home/me/venv/bin/python",
                "resources": resources,
                "launcher": launcher_name,
                **fields,
            }
        )
        site = Site(cluster, Templates(folders=tuple(folders)), runtime)
        return render(spec, site, resolution.layout, launcher, place)

    return make
