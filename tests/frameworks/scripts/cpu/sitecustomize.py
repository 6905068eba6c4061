"""Lets torchtitan, which asks its GPU for name and memory, train on a CPU; imported by every Python."""

import types

import torch

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1 << 30)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda device=None: None
torch.cpu.memory_stats = lambda device=None: {}
