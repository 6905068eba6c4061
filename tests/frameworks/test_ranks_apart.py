"""Scripts that start no process group: the run is reported while its ranks train separately."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Cli
from tests.frameworks.conftest import Activated
from tests.frameworks.test_torch_family import everything, torch_python  # noqa: F401 - a fixture

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(1500)]

# What trains on and on, until the run is marked or the time is over.
UNTIL_MARKED = """\
import os, pathlib, time
events, end = pathlib.Path(os.environ["DTSLURM_RUN_DIR"], "events.jsonl"), time.time() + 120
def is_over():
    return time.time() > end or '"evidence"' in events.read_text()
"""
STOP = """\
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
class Stop(Callback):
    def on_train_batch_end(self, *words):
        time.sleep(0.05)
    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = is_over()
"""
WITHOUT_NUM_NODES = (
    UNTIL_MARKED
    + STOP
    + """\
Trainer(max_epochs=-1, callbacks=[Stop()], logger=False, enable_checkpointing=False).fit(BoringModel())
"""
)
CLI_WITHOUT_NUM_NODES = (
    UNTIL_MARKED
    + STOP
    + """\
from lightning.pytorch.cli import LightningCLI
options = {"callbacks": Stop(), "max_epochs": -1, "logger": False, "enable_checkpointing": False}
LightningCLI(BoringModel, BoringDataModule, trainer_defaults=options, save_config_callback=None)
"""
)
ACCELERATOR = (
    UNTIL_MARKED
    + """\
import torch
from accelerate import Accelerator
accelerator = Accelerator()
print(accelerator.state, flush=True)  # as Hugging Face's examples do
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
while not is_over():
    loss = model(torch.ones(4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print("loss", loss.item(), flush=True)
    time.sleep(0.3)
"""
)
CASES = {
    "lightning": ("lightning", WITHOUT_NUM_NODES, (), ()),
    "lightning-torchrun": ("torchrun", WITHOUT_NUM_NODES, (), ()),
    "cli": ("lightning", CLI_WITHOUT_NUM_NODES, (), ("fit",)),
    "accelerate": ("accelerate", ACCELERATOR, ("--env", "ACCELERATE_USE_CPU=false"), ()),
}


@pytest.fixture
def cli(activated: Activated, torch_python: Path) -> Cli:  # noqa: F811 - the fixture
    return activated(torch_python)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_train_separately_are_reported(cli: Cli, case: str) -> None:
    launcher, text, options, args = CASES[case]
    script = cli.script(text, "apart.py")
    job = cli.submit("-N2", "--ntasks-per-node", "2", "-l", launcher, *options, script, *args)
    status = cli.wait_for_end(job, limit=400)["statuses"][0]
    run = cli.run_dir(job)
    assert status["state"] == "COMPLETED", everything(run)
    stdout = cli("status", job).stdout
    assert "NOT DISTRIBUTED: the 4 ranks do not train together: " in stdout, everything(run)
    seen = (
        "the logs of ranks 2-3 on n2 report a process group of 1 process"
        if case == "accelerate"
        else "leads from"
    )
    assert seen in stdout
