"""Logs one loss to three trackers, and says nothing of what the run is: the environment does."""

import os

import mlflow
import wandb
from tensorboardX import SummaryWriter

with wandb.init() as run:
    run.log({"loss": 0.5})
with mlflow.start_run():
    mlflow.log_metric("loss", 0.5)
with SummaryWriter(os.environ["TENSORBOARD_LOGDIR"]) as writer:
    writer.add_scalar("loss", 0.5, 1)
