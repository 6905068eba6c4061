"""The scripts that start the instances of roles beside the training."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from dtslurm.model.cluster import ClusterProfile
from dtslurm.model.jobs.components import count_gpus_of_node
from dtslurm.model.jobs.job import JobSpec, TaskLayout
from dtslurm.model.jobs.roles import Roles, RoleSpec, port_variable, quote_with_references
from dtslurm.model.shell import RawShell, quote
from dtslurm.render.engine import Engine
from dtslurm.render.inside import ContainerParts
from dtslurm.render.text import wrap

# An instance shares the CPUs, the memory and the GPUs of its node with the other steps there.
_SHARED = ("--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none")


def role_files(
    engine: Engine,
    spec: JobSpec,
    profile: ClusterProfile,
    values: Mapping[str, object],
    containers: Mapping[str, ContainerParts],
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the two scripts of each role: one that starts a step, and that step's task.

    Args:
        values: the values of the job's own templates.
        containers: the container of each role, by its name.
    """
    for role in spec.other_roles:
        container = containers[role.name]
        task = RawShell(f'"$DTSLURM_RUN_DIR/role-{role.name}-task.sh"')
        count = role.options.nodes_per_instance
        srun = [
            "srun",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            RawShell('--nodelist="$1"'),
        ]
        if spec.roles is not None and (component := spec.roles.component_of(role)):
            srun.append(f"--het-group={component}")
        if count > 1:
            # Only srun writes the log: several nodes cannot append to one file of a network file system.
            srun += ["--kill-on-bad-exit=1", "--open-mode=append", RawShell('--output="$DTSLURM_ROLE_LOG"')]
        words = (*srun, *_SHARED, *profile.slurm.srun_options, *container.words(), "bash", task)
        role_values = {
            **values,
            **container.values(),
            "role": RawShell(role.name),
            "withheld": RawShell(" ".join(_withheld_secrets(spec, role))),
            "role_srun": RawShell(wrap(words)),
            "one_address": profile.scheduler == "local",
        }
        yield f"role-{role.name}.sh", engine.render("roles/step.sh.j2", role_values)
        yield f"role-{role.name}-task.sh", engine.render("roles/task.sh.j2", role_values | _task_values(role))


def _withheld_secrets(spec: JobSpec, role: RoleSpec) -> list[str]:
    names = role.options.secrets
    return [] if names is None else [name for name in spec.secrets if name not in names]


def _task_values(role: RoleSpec) -> dict[str, object]:
    options = role.options
    command = tuple(quote_with_references(word) for word in (*options.command, *options.args))
    port_format = json.dumps(dict.fromkeys(role.ports, "%d")).replace('"%d"', "%d")
    return {
        "environment": options.environment and _quote_with_home(options.environment),
        "role_setup": tuple(RawShell(line) for line in options.setup),
        "role_variables": [
            {"name": RawShell(name), "value": quote_with_references(value or "")}
            for name, value in options.env.items()
        ],
        "node_count": options.nodes_per_instance,
        "ports": bool(role.ports),
        "port_names": [RawShell(port_variable(name)) for name in role.ports],
        "port_format": RawShell(port_format),
        "role_command": RawShell(wrap(command)),
    }


def _quote_with_home(path: str) -> str:
    """Return a path as one word in which the shell of the job expands a leading ``~`` or ``~USER``."""
    prefix = re.match(r"~[\w.-]*(?=/|$)", path)
    if prefix is None:
        return path
    home = '"$HOME"' if prefix[0] == "~" else prefix[0]
    folder = path[prefix.end() + 1 :]
    return RawShell(f"{home}/{quote(folder)}" if folder else home)


def roles_plan(spec: JobSpec, profile: ClusterProfile, layout: TaskLayout) -> dict[str, object]:
    """Return what the supervisor must know about the roles, as a JSON object."""
    assert spec.roles is not None  # noqa: S101 - the caller has roles
    return {
        "schema": 1,
        "main": spec.roles.main,
        "main_after": spec.roles.after,
        "gpus_of_ranks": min(layout.ranks_per_node, layout.gpus_per_node),
        "roles": [
            _describe_role(role, spec.roles, layout, count_gpus_of_node(role, spec.roles, layout, profile))
            for role in spec.roles.others
        ],
    }


def _describe_role(role: RoleSpec, roles: Roles, layout: TaskLayout, gpus_per_node: int) -> dict[str, object]:
    options, ready = role.options, role.ready
    return {
        "name": role.name,
        "nodes": role.nodes,
        "on": role.on,
        "instances": role.instances,
        "nodes_per_instance": options.nodes_per_instance,
        "per_node": options.instances is None and (role.nodes > 0 or options.per is not None),
        "component": roles.component_of(role),
        "gpus_per_node": gpus_per_node,
        "gpus": roles.gpus_per_instance(role, layout.nodes, gpus_per_node),
        "ports": role.ports,
        "http": ready.http,
        "tcp": ready.tcp is not None,
        "line": ready.line,
        "file": ready.file,
        "ready_port": role.ready_port,
        "within": ready.within_s,
        "silence": ready.silence_s,
        "metrics": options.metrics,
        "restarts": options.restarts,
        "restart": role.restart,
        "finish": options.finish.seconds if options.finish is not None else 0,
        "after": role.after,
    }
