"""What all layouts of a search share: model, machine, sequence length, framework and precision."""

from __future__ import annotations

from dataclasses import dataclass

from dtslurm.planner.constants import Constants
from dtslurm.planner.hardware import Machine
from dtslurm.planner.models.shapes import ModelShape


@dataclass(frozen=True)
class Setting:
    """The settings that all layouts of a search share.

    Attributes:
        seq_len: sequence length in tokens.
        frozen: whether the weights are frozen and only small adapters are trained (LoRA).
        even: whether tokens are routed to experts evenly (see :mod:`routing`).
        dispatches_once: whether a token crosses the network once per node (DeepEP, HybridEP), also where this
            is not usual in the framework.
        graphs: whether layers are replayed as CUDA graphs, also where this is not usual in the framework.
    """

    model: ModelShape
    machine: Machine
    seq_len: int
    framework: str
    precision: str
    constants: Constants
    frozen: bool = False
    even: bool = False
    dispatches_once: bool = False
    graphs: bool = False
