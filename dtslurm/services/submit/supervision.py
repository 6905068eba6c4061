"""Files that a supervised run needs: the supervisor, the diagnosis rules, and the node health request."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from dtslurm import assets
from dtslurm.config import signatures as known
from dtslurm.launch import registry
from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.components import count_gpus_of_node, find_component_destination
from dtslurm.model.jobs.destination import choose_destination
from dtslurm.model.jobs.job import Submission
from dtslurm.render.roles import roles_plan
from dtslurm.services.wiring.context import Context
from dtslurm.worker.sampler_values import PLAIN_NODES

FOLDER = "supervisor"
PROGRAMS_OF_ROLES = {  # with the modules that they import
    "evaluator.py": ("evaluator.py", "lib/json_records.py"),
    "ray_node.py": ("ray_node.py", "ray_start.py"),
}
_MODULES = "modules.zip"
# Thousands of nodes start these programs at the same time. In a large job, they import their modules from a
# copy of one file, because a zip file on sys.path is opened again for each module.
_SUPERVISOR_MAIN = f"""\
import os
import sys


def import_from_copy(path):
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("modules")
    else:
        descriptor = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    with open(path, "rb") as file, os.fdopen(descriptor, "wb", closefd=False) as copy:
        copy.write(file.read())
    sys.path[0] = "/proc/self/fd/%d" % descriptor


count = os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES", "")
plain = os.environ.get("DTSLURM_PLAIN_NODES", "")
is_large = count.isdigit() and int(count) > int(plain if plain.isdigit() else {PLAIN_NODES})
if is_large and sys.argv[1:2] in (["node"], ["collect"], ["preflight"]):
    try:
        import_from_copy(os.path.join(sys.path[0], "{_MODULES}"))
    except OSError:
        pass  # the modules are also beside this file
if sys.argv[1:2] == ["node"]:
    from worker.supervisor.node import main

    main(restarted=sys.argv[2:] == ["restarted"])
elif sys.argv[1:2] == ["collect"]:
    from worker.supervisor.node import collect_files

    collect_files()
elif sys.argv[1:2] == ["preflight"]:
    from worker.preflight.main import main

    main(sys.argv[2:])
elif sys.argv[1:2] == ["nsys"]:
    from worker.lib.start_below_nsys import main

    main(sys.argv[2:])
elif sys.argv[1:2] == ["notify"]:
    from worker.notify.sender import main

    sys.exit(main(sys.argv[2:]))
else:
    from worker.supervisor.main import main

    main()
"""
_DIAGNOSE_MAIN = """\
from dtslurm.diagnose.program import main

main()
"""
_RDMA = {
    "infiniband",
    "roce",
    "omnipath",
}  # their adapters report state and rate in /sys/class/infiniband
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # fixed, so that the bytes of the zip do not depend on the clock


def files(context: Context) -> dict[str, bytes]:
    """Return the supervisor's files by their paths in the run directory.

    Raises:
        ProfileInvalid: a log signature file is invalid.
    """
    worker = assets.worker("supervisor").parent
    paths = [worker / "__init__.py", *sorted(worker.glob("sampler_*.py"))]
    for package in ("evidence", "lib", "notify", "preflight", "stacks", "supervisor"):
        paths += sorted((worker / package).rglob("*.py"))
    contents = {f"{FOLDER}/worker/{path.relative_to(worker)}": path.read_bytes() for path in paths}
    signatures = known.load(context.cwd, context.env)
    signature_rules = {"schema": 1, "signatures": [asdict(signature) for signature in signatures]}
    modules = {
        name.removeprefix(f"{FOLDER}/"): source
        for name, source in contents.items()
        if "/evidence/" not in name
    }
    contents[f"{FOLDER}/{_MODULES}"] = _build_zip(modules)
    contents[f"{FOLDER}/__main__.py"] = _SUPERVISOR_MAIN.encode()
    contents[f"{FOLDER}/rules.json"] = json.dumps(signature_rules).encode()
    contents[f"{FOLDER}/rules.zip"] = _build_rules_zip(worker.parent)
    return contents


def health_files(submission: Submission, profile: ClusterProfile) -> dict[str, bytes]:
    """Return the files with the hardware that the node health check expects, from the request and profile.

    There is one for each component of the job.
    """
    spec, layout = submission.spec, submission.layout
    if spec.health_check is False:
        return {}
    launcher = registry.load(spec.launcher).chosen(spec)
    node = choose_destination(spec.resources, profile).node
    fabric, nics = profile.fabric, node.nics if node else None
    expected = {
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
    files = {f"{FOLDER}/health.json": json.dumps(expected).encode()}
    for number, role in enumerate(spec.roles.components if spec.roles is not None else (), start=1):
        node = find_component_destination(role, profile).node
        requirements = {
            **expected,
            "nodes": role.nodes,
            "gpus": count_gpus_of_node(role, spec.roles, layout, profile) if spec.roles is not None else 0,
            "vendor": node.gpus.vendor if node and node.gpus else None,
            "intra_node": node.intra_node.kind if node and node.intra_node else None,
            "rdma": False,  # the profile states the network of the usual nodes only
            "hcas": (),
            "local_disk": node.local_disk.path if node and node.local_disk else None,
            "rendezvous": False,
            "framework": "",  # ranks do not run there
        }
        files[f"{FOLDER}/health-{number}.json"] = json.dumps(requirements).encode()
    return files


def roles_file(submission: Submission, profile: ClusterProfile) -> dict[str, bytes]:
    """Return the file that describes the run's roles to the supervisor; none for a run of one role."""
    spec = submission.spec
    if not spec.other_roles:
        return {}
    files = {f"{FOLDER}/roles.json": json.dumps(roles_plan(spec, profile, submission.layout)).encode()}
    words = [word for role in spec.other_roles for word in role.options.command]
    for program, names in PROGRAMS_OF_ROLES.items():
        if any(word == f"$DTSLURM_RUN_DIR/{program}" for word in words):
            files |= {Path(name).name: assets.worker(name).read_bytes() for name in names}
    return files


def _build_rules_zip(package: Path) -> bytes:
    """Return the rules of `dtslurm diagnose` as a zip program that reads values and prints a diagnosis."""
    names = (
        "__init__.py",
        "exit_codes.py",
        "values.py",
        "runs/__init__.py",
        "runs/diagnosis.py",
        "runs/live.py",
    )
    model = [package / "model" / name for name in names]
    lib_names = ("__init__.py", "lib/__init__.py", "lib/json_records.py", "lib/wait_words.py")
    worker = [package / "worker" / name for name in lib_names]
    paths = [package / "__init__.py", *model, *worker, *sorted((package / "diagnose").glob("*.py"))]
    modules = {f"{package.name}/{path.relative_to(package)}": path.read_bytes() for path in paths}
    return _build_zip({"__main__.py": _DIAGNOSE_MAIN.encode(), **modules})


def _build_zip(contents: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in contents.items():
            archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
