"""Examples of each command for its help, the manual and the documentation."""

from __future__ import annotations

from collections.abc import Mapping

import click

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "init": ("dtslurm init", "dtslurm init login.example.org", "dtslurm init --yes --no-demo"),
    "submit": (
        "dtslurm submit train.py --lr 3e-4",
        "dtslurm submit -N 2 --gpus-per-node 8 -t 8:00:00 train.py",
        "dtslurm submit --cluster perlmutter --max-restarts 3 --follow train.py",
        "dtslurm submit job.yaml --set lr=1e-3 -- --epochs 2",
        "dtslurm submit --in 17 -f train.py",
    ),
    "alloc": (
        "dtslurm alloc -N 2 --gpus-per-node 8 -t 4:00:00",
        "dtslurm alloc -N 16 -t 2:00:00 --idle 10m",
    ),
    "notebook": ("dtslurm notebook --gpus-per-node 1 -t 4:00:00", "dtslurm notebook --idle 2h --open"),
    "code": ("dtslurm code --gpus-per-node 1 -t 4:00:00",),
    "render": (
        "dtslurm render -N 2 -l torchrun train.py > job.sbatch",
        "dtslurm render --cluster perlmutter job.yaml",
    ),
    "status": ("dtslurm status", "dtslurm status 17", "dtslurm status --state failed,timeout --since 2d"),
    "logs": (
        "dtslurm logs -f 17",
        "dtslurm logs 17 --rank 0,3-7 --tail 50",
        "dtslurm logs 17 --role rollout",
    ),
    "top": ("dtslurm top", "dtslurm top 17", "dtslurm top --once --json"),
    "exec": ("dtslurm exec 17", "dtslurm exec 17 --rank 1 nvidia-smi", "dtslurm exec 17 --all -- df -h /tmp"),
    "profile": ("dtslurm profile 17", "dtslurm profile 17 --rank 0,8 --seconds 30"),
    "forward": (
        "dtslurm forward 17 8888",
        "dtslurm forward 17 0:6006 --rank 1 --open",
        "dtslurm forward 17 --role rollout",
    ),
    "diagnose": ("dtslurm diagnose", "dtslurm diagnose 17 --attempt 0", "dtslurm diagnose 17 --live"),
    "report": ("dtslurm report 17", "dtslurm report 17 -o run.html"),
    "compare": ("dtslurm compare 17 18", "dtslurm compare 17 18 19 -o compare.html"),
    "fetch": ("dtslurm fetch 17", "dtslurm fetch 17 'checkpoints/*' -o results"),
    "artifacts list": ("dtslurm artifacts list 17",),
    "artifacts show": ("dtslurm artifacts show 17 checkpoints/step-100",),
    "artifacts pull": (
        "dtslurm artifacts pull 17",
        "dtslurm artifacts pull 17 checkpoints/step-100 --to hf:model",
    ),
    "artifacts pin": ("dtslurm artifacts pin 17 checkpoints/step-100",),
    "artifacts unpin": ("dtslurm artifacts unpin 17 checkpoints/step-100",),
    "artifacts prune": ("dtslurm artifacts prune 17 --keep 3 --yes",),
    "cancel": ("dtslurm cancel 17", "dtslurm cancel 17_3 train"),
    "scale": ("dtslurm scale 17 rollout=3",),
    "requeue": ("dtslurm requeue 17",),
    "resubmit": ("dtslurm resubmit 17", "dtslurm resubmit 17 --from-checkpoint"),
    "sweep status": ("dtslurm sweep status 17",),
    "sweep results": ("dtslurm sweep results 17 -n 5", "dtslurm sweep results 17 --csv"),
    "sweep resume": ("dtslurm sweep resume 17",),
    "sweep stop": ("dtslurm sweep stop 17",),
    "hold": ("dtslurm hold 17",),
    "release": ("dtslurm release 17",),
    "plan": (
        "dtslurm plan llama-3-8b --gpu H100-80GB -N 4",
        "dtslurm plan llama-3-70b --cluster h100x8-ib -N 16 -s 8192 --emit megatron",
        "dtslurm plan llama-3-8b --cluster ours -N 2 --top 3 --probe train.py -- --tp '${tp}' --mbs '${mbs}'",
    ),
    "usage": ("dtslurm usage", "dtslurm usage --since 8w --by week --csv"),
    "clean": ("dtslurm clean", "dtslurm clean --older-than 14d --yes"),
    "cluster list": ("dtslurm cluster list",),
    "cluster show": ("dtslurm cluster show perlmutter --sources",),
    "cluster discover": ("dtslurm cluster discover login.example.org -o cluster_profiles/ours.yaml",),
    "cluster check": ("dtslurm cluster check", "dtslurm cluster check perlmutter --no-probe"),
    "cluster schema": ("dtslurm cluster schema job > job.schema.json",),
    "cluster nodes": ("dtslurm cluster nodes",),
    "cluster nodes add": ("dtslurm cluster nodes add n7 --reason 'GPU 3 has ECC errors'",),
    "cluster nodes remove": ("dtslurm cluster nodes remove 'n[3-5]'",),
    "trust": ("dtslurm trust", "dtslurm trust cluster_profiles/ours.yaml"),
    "completion": (
        "dtslurm completion bash > ~/.local/share/bash-completion/completions/dtslurm",
        "dtslurm completion zsh > FOLDER/_dtslurm",
        "dtslurm completion fish > ~/.config/fish/completions/dtslurm.fish",
    ),
    "manual": (
        "dtslurm manual | man -l -",
        "dtslurm manual > ~/.local/share/man/man1/dtslurm.1",
    ),
    "doctor": ("dtslurm doctor", "dtslurm doctor --cluster perlmutter"),
}


def add_examples(command: click.Command, path: str) -> None:
    """Append the examples of a command and of its subcommands to their help."""
    lines = EXAMPLES.get(path, ())
    if lines:
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
    for name, subcommand in getattr(command, "commands", {}).items():
        add_examples(subcommand, f"{path} {name}")
