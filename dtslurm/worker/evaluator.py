"""Evaluate each registered checkpoint of a run once: ``python evaluator.py COMMAND...`` as a role of the run.

The command gets the checkpoint's path in ``$DTSLURM_CHECKPOINT`` and its step in ``$DTSLURM_STEP``; a word
``{checkpoint}`` is replaced with the path. Each evaluation appends a line to ``evaluations.jsonl`` in the run
directory. Several instances share the checkpoints. The program ends when the training is over and every
checkpoint has been evaluated.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

try:
    from .lib.json_records import read_lines, read_object, whole_number
except ImportError:  # beside this file, in a run directory
    from json_records import (  # type: ignore[import-not-found,no-redef]
        read_lines,
        read_object,
        whole_number,
    )

RESULTS, CLAIMS, FINISHING = "evaluations.jsonl", "evaluations", "finishing"
ENDED_STATES = ("removed", "ended", "failed")
POLL_S = 2.0
TRIES = 2  # of a command that fails


def main(command: List[str]) -> int:
    """Evaluate checkpoints until the training is over, and return 0; failures are in the results."""
    run_dir = os.environ["DTSLURM_RUN_DIR"]
    while True:
        is_over = os.path.exists(os.path.join(run_dir, FINISHING))
        checkpoint = find_next(run_dir)
        if checkpoint is not None:
            evaluate(run_dir, checkpoint, command)
        elif is_over:
            return 0
        else:
            time.sleep(POLL_S)


def find_next(run_dir: str) -> Optional[Dict[str, Any]]:
    """Claim and return the oldest checkpoint that no instance has evaluated; None if there is none."""
    evaluated = {record.get("checkpoint") for record in read_lines(os.path.join(run_dir, RESULTS))}
    register = os.environ.get("DTSLURM_ARTIFACTS") or os.path.join(run_dir, "artifacts.jsonl")
    for record in read_lines(register):
        path = record.get("path")
        if record.get("kind") != "checkpoint" or not isinstance(path, str) or path in evaluated:
            continue
        if os.path.exists(os.path.join(run_dir, path)) and claim(run_dir, path):
            return record
    return None


def claim(run_dir: str, path: str) -> bool:
    """Return whether this start of this instance may evaluate a checkpoint.

    The claim of another instance holds until ``roles.json`` records its end; the claim of an earlier start of
    this instance has ended with that start.
    """
    folder = os.path.join(run_dir, CLAIMS)
    os.makedirs(folder, exist_ok=True)
    file = os.path.join(folder, re.sub(r"[^A-Za-z0-9._-]", "_", path) + ".json")
    own = {
        "checkpoint": path,
        "instance": os.environ.get("DTSLURM_ROLE", "") + "-" + os.environ.get("DTSLURM_ROLE_INSTANCE", ""),
        "start": os.environ.get("DTSLURM_ROLE_START", ""),
    }
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        holder = read_object(file)
        is_own = holder.get("instance") == own["instance"]
        if holder == own or not (is_own or (has_ended(run_dir, holder) and take_over(file, holder))):
            return False
        descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC)
    with os.fdopen(descriptor, "w") as target:
        json.dump(own, target)
    return True


def has_ended(run_dir: str, holder: Dict[str, Any]) -> bool:
    """Return whether the instance that holds a claim evaluates nothing further."""
    for role in read_object(os.path.join(run_dir, "roles.json")).get("roles") or []:
        for instance in role.get("instances") or []:
            if "{}-{}".format(role.get("name"), instance.get("instance")) == holder.get("instance"):
                return instance.get("state") in ENDED_STATES
    return False


def take_over(file: str, holder: Dict[str, Any]) -> bool:
    """Return whether this instance is the first one to take over a claim from its holder."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", "{}-{}".format(holder.get("instance"), holder.get("start")))
    try:
        os.close(os.open("{}.after-{}".format(file, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True


def evaluate(run_dir: str, checkpoint: Dict[str, Any], command: List[str]) -> None:
    """Run the command on a checkpoint, and record the result."""
    path = os.path.join(run_dir, checkpoint["path"])
    step = whole_number(checkpoint.get("step"))
    env = dict(os.environ, DTSLURM_CHECKPOINT=path, DTSLURM_STEP="" if step is None else str(step))
    words = [path if word == "{checkpoint}" else word for word in command]
    code, began = 1, time.time()
    for _ in range(TRIES):
        print("evaluating {}".format(checkpoint["path"]), flush=True)
        try:
            code = subprocess.call(words, env=env)
        except OSError as error:
            print("the command cannot be started: {}".format(error), flush=True)
            code = 127
        if code == 0 or not os.path.exists(path):  # it was deleted in the meantime
            break
    record = {
        "time": round(time.time(), 3), "checkpoint": checkpoint["path"], "step": step, "exit_code": code,
        "seconds": round(time.time() - began, 3),
    }  # fmt: skip
    with contextlib.suppress(OSError):
        descriptor = os.open(os.path.join(run_dir, RESULTS), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(json.dumps(record).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
