"""A run resumes bit for bit with any optimizer, scheduler and custom state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.optim import lr_scheduler

from dtslurm.errors import RequestInvalid
from dtslurm.train import Checkpointer
from dtslurm.train import state as objects
from tests.train.test_packing import is_equal_nest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*lr_scheduler.step")
OPTIMIZERS = {
    name: kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
OPTIONS: dict[str, dict[str, Any]] = {
    "LBFGS": {"max_iter": 3},
    "SGD": {"momentum": 0.9, "dampening": 0.5},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "AdamW": {"amsgrad": True},
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3, 4]),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)], [2]
    ),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
}


class Net(nn.Module):  # type: ignore[misc, unused-ignore]
    """A net one of whose parameters never gets a gradient, and another only from the fifth step on."""

    def __init__(self, *, sparse: bool, flat: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=sparse)
        self.never = nn.Parameter(torch.ones(2, 2))
        self.late = nn.Parameter(torch.ones(3, 1))
        self.bias = None if flat or sparse else nn.Parameter(torch.zeros(3))

    def forward(self, step: int) -> torch.Tensor:
        rows = self.table(torch.tensor([step % 6, (step + 1) % 6]))
        rows = rows if self.bias is None else rows + self.bias
        return (rows.pow(2).sum() - 1).pow(2) + (self.late.sum() if step >= 5 else 0)


class Growing:
    """An object whose state grows: lists, numbers as keys, tensors, copies of the weights."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.at: dict[int, Any] = {}
        self.average: dict[str, torch.Tensor] = {}

    def see(self, step: int, loss: torch.Tensor, net: nn.Module) -> None:
        self.losses.append(loss.detach())
        self.at[step] = {"loss": float(loss.detach()), "seen": [(step, torch.tensor(step))]}
        for name, item in net.named_parameters():
            self.average[name] = (
                self.average.get(name, item.detach().clone()).mul(0.9).add(item.detach(), alpha=0.1)
            )

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def make_objects(name: str, scheduler: str) -> dict[str, Any]:
    torch.manual_seed(3)
    net = Net(sparse=name == "SparseAdam", flat=name == "Muon")
    parameters = [item for item in net.parameters() if item.ndim == 2] if name == "Muon" else net.parameters()
    if name == "SparseAdam":
        parameters = net.table.parameters()
    optimizer = OPTIMIZERS[name](parameters, **{"lr": 0.05, **OPTIONS.get(name, {})})
    return {
        "net": net,
        "optimizer": optimizer,
        "scheduler": SCHEDULERS[scheduler](optimizer),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
        "growing": Growing(),
    }


def train(run: dict[str, Any], steps: range) -> None:
    optimizer, scaler = run["optimizer"], run["scaler"]
    for step in steps:

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = run["net"](step)
            (loss if isinstance(optimizer, torch.optim.LBFGS) else scaler.scale(loss)).backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            loss = optimizer.step(closure)
        else:
            loss = closure()
            scaler.step(optimizer)
            scaler.update()
        plateau = isinstance(run["scheduler"], lr_scheduler.ReduceLROnPlateau)
        run["scheduler"].step(*([float(loss.detach())] if plateau else []))
        run["growing"].see(step, loss, run["net"])


def state_of(run: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(item.state_dict()) for name, item in run.items()}


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bit_for_bit(name: str, at: int, tmp_path: Path) -> None:
    undisturbed, first, second = (make_objects(name, "MultiStepLR") for _ in range(3))
    train(undisturbed, range(8))
    train(first, range(at))
    Checkpointer(tmp_path).save(at, first, wait=True)
    restored = Checkpointer(tmp_path).restore(second)
    assert restored is not None
    assert is_equal_nest(state_of(second), state_of(first))
    train(first, range(at, 8))
    train(second, range(at, 8))
    assert is_equal_nest(state_of(first), state_of(undisturbed))  # saving changes nothing
    assert is_equal_nest(state_of(second), state_of(undisturbed))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_resumes_bit_for_bit(scheduler: str, tmp_path: Path) -> None:
    undisturbed, first, second = (make_objects("AdamW", scheduler) for _ in range(3))
    train(undisturbed, range(8))
    train(first, range(3))
    Checkpointer(tmp_path).save(3, first, wait=True)
    Checkpointer(tmp_path).restore(second)
    train(second, range(3, 8))
    assert is_equal_nest(state_of(second), state_of(undisturbed))


def test_checkpoint_of_an_earlier_version_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_objects("AdamW", "LambdaLR"), make_objects("AdamW", "LambdaLR")
    train(first, range(3))
    with monkeypatch.context() as patch:
        patch.setattr(objects, "pack", lambda value: value)  # as it was: the nest itself
        Checkpointer(tmp_path).save(3, first, wait=True)
    Checkpointer(tmp_path).restore(second)
    assert is_equal_nest(state_of(second)["net"], state_of(first)["net"])
    assert is_equal_nest(state_of(second)["optimizer"]["state"], state_of(first)["optimizer"]["state"])
    assert second["growing"].losses == first["growing"].losses


def test_checkpoint_with_other_parameter_groups_is_refused(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    Checkpointer(tmp_path).save(1, {"net": net, "opt": torch.optim.SGD(net.parameters(), lr=0.1)}, wait=True)
    groups = [{"params": [net.weight]}, {"params": [net.bias]}]
    with pytest.raises(RequestInvalid, match="the parameter groups of opt differ from those"):
        Checkpointer(tmp_path).restore({"net": net, "opt": torch.optim.SGD(groups, lr=0.1)})
