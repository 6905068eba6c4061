"""Evaluates a checkpoint of examples/survive/train.py: ``evaluate.py CHECKPOINT`` prints its error."""

import sys

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
state = {"model": net.state_dict()}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
net.load_state_dict(state["model"])
inputs = torch.linspace(-3, 3, 500).unsqueeze(1)
with torch.no_grad():
    print("mean squared error", nn.functional.mse_loss(net(inputs), torch.sin(inputs)).item(), flush=True)
