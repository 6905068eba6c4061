"""What a run needs beside its script to survive: the supervisor, and the rules by which causes are named."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import asdict
from pathlib import Path

from dtslurm import assets
from dtslurm.config import signatures as known
from dtslurm.launch import registry
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.destination import destination
from dtslurm.model.jobs.job import Submission
from dtslurm.services.wiring.context import Context

FOLDER = "supervisor"
_START = """\
from worker.supervisor.main import main

main()
"""
_JUDGE = """\
from dtslurm.diagnose.program import main

main()
"""
_RDMA = {
    "infiniband",
    "roce",
    "omnipath",
}  # whose adapters show their state and rate in /sys/class/infiniband
_MOMENT = (1980, 1, 1, 0, 0, 0)  # a zip's bytes must not depend on the clock


def files(context: Context) -> dict[str, bytes]:
    """Return the supervisor's files by their paths in the run directory.

    Raises:
        ProfileInvalid: a file of signatures is wrong.
    """
    worker = assets.worker("supervisor").parent
    paths = [
        worker / "__init__.py",
        worker / "lib" / "__init__.py",
        worker / "lib" / "node_blocklist.py",
        *sorted(worker.glob("sampler_*.py")),
    ]
    for package in ("evidence", "preflight", "stacks", "supervisor"):
        paths += sorted((worker / package).rglob("*.py"))
    found = {f"{FOLDER}/worker/{path.relative_to(worker)}": path.read_bytes() for path in paths}
    signatures = known.load(context.cwd, context.env)
    rules = {"schema": 1, "signatures": [asdict(one) for one in signatures]}
    found[f"{FOLDER}/__main__.py"] = _START.encode()
    found[f"{FOLDER}/rules.json"] = json.dumps(rules).encode()
    found[f"{FOLDER}/rules.zip"] = _rules(worker.parent)
    return found


def health_file(submission: Submission, profile: ClusterProfile) -> dict[str, bytes]:
    """Return what the look at the nodes' health is to find, as far as the request and the profile tell."""
    spec, layout = submission.spec, submission.layout
    if spec.health_check is False:
        return {}
    launcher = registry.load(spec.launcher).chosen(spec)
    node = destination(spec.resources, profile).node
    fabric, nics = profile.fabric, node.nics if node else None
    wanted = {
        "schema": 1,
        "nodes": layout.nodes,
        "gpus": layout.gpus_per_node,
        "vendor": node.gpus.vendor if node and node.gpus else None,
        "intra_node": node.intra_node.kind if node and node.intra_node else None,
        "rdma": bool(fabric and fabric.kind in _RDMA),
        "hcas": fabric.hcas if fabric and fabric.kind in _RDMA else (),
        "nic_count": nics.count if nics else None,
        "rate_gbps": nics.rate_gbps if nics else None,
        "local_disk": node.local_disk.path if node and node.local_disk else None,
        "rendezvous": launcher.needs_rendezvous(layout) and profile.slurm.head_address is None,
        "head": profile.slurm.head_address,
        "host_suffix": profile.slurm.host_suffix,
        "framework": "" if spec.container else launcher.framework,
        "python": spec.python,
        "work_dir": spec.work_dir,
        "srun_options": profile.slurm.srun_options,
    }
    return {f"{FOLDER}/health.json": json.dumps(wanted).encode()}


def _rules(package: Path) -> bytes:
    """Return the judgement of `dtslurm diagnose` as a program in one file: values in, a verdict out."""
    names = ("__init__.py", "exit_codes.py", "values.py", "runs/__init__.py", "runs/diagnosis.py")
    model = [package / "model" / name for name in names]
    paths = [package / "__init__.py", *model, *sorted((package / "diagnose").glob("*.py"))]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py", _MOMENT), _JUDGE)
        for path in paths:
            name = f"{package.name}/{path.relative_to(package)}"
            archive.writestr(zipfile.ZipInfo(name, _MOMENT), path.read_bytes())
    return buffer.getvalue()
