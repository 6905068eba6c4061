"""Well-known models by name: ``data/models.json``, with the relevant keys of each ``config.json``."""

from __future__ import annotations

import json
import re
from functools import cache

from dtslurm.planner.hardware import DATA
from dtslurm.planner.models.huggingface import read_config
from dtslurm.planner.models.shapes import ModelShape


@cache
def _configs() -> dict[str, dict[str, object]]:
    configs: dict[str, dict[str, object]] = json.loads((DATA / "models.json").read_text("utf-8"))
    return configs


def names() -> list[str]:
    """Return the names of all presets."""
    return sorted(_configs())


def config(name: str) -> dict[str, object]:
    """Return a preset's shortened ``config.json``."""
    return _configs()[name]


@cache
def preset(name: str) -> ModelShape:
    """Return the preset with exactly this name."""
    return read_config(_configs()[name], name)


def _normalize_name(name: str) -> str:
    """Normalize a model name: drop case, owner, dashes and suffixes such as ``-chat``; Llama 3.1 is 3."""
    normalized = name.lower().rpartition("/")[2]
    normalized = re.sub(r"(meta-|-hf$|-instruct$|-base$|-v0\.\d$|-uncased$|-cased$|-chat$)", "", normalized)
    normalized = re.sub(r"(llama)[-_ ]?3[._]?[13](?=[^\d])", r"\g<1>3", normalized)
    normalized = re.sub(r"patch", "", normalized)
    return re.sub(r"[^a-z0-9.]", "", normalized)


_ALIASES = {
    "grok1314b": "grok-1",
    "vitbase16224": "vit-b-16",
    "gpt175b": "gpt3-175b",
    "bloom": "bloom-176b",
    "llama30b": "llama-33b",
    "deepseekv3671b": "deepseek-v3",
    "deepseekv2236b": "deepseek-v2",
    "llama4e16": "llama-4-scout",
    "llama4e128": "llama-4-maverick",
    "llama4scout17b16e": "llama-4-scout",
    "llama4maverick17b128e": "llama-4-maverick",
    "mtnlg": "mt-nlg-530b",
    "megatronturingnlg530b": "mt-nlg-530b",
}


_REMARK = re.compile(r"[(\[{].*?[)\]}]|,.*$|\b(with|proxy|truncated|reduced|shortened)\b.*$", re.IGNORECASE)


def find_preset(name: str) -> ModelShape | None:
    """Return the preset for a name in any usual spelling, None if there is none.

    A remark in brackets, after a comma, or such as ``with 4 layers`` is not part of the name.
    """
    names_by_spelling = {_normalize_name(preset_name): preset_name for preset_name in _configs()}
    names_by_spelling |= _ALIASES
    for spelling in (name, _REMARK.sub(" ", name).strip()):
        match = names_by_spelling.get(_normalize_name(spelling))
        if match:
            return preset(match)
    return None


def layers_in_remark(name: str) -> int | None:
    """Return the number of layers that a remark in a model's name gives, as in ``deepseek-v3 (4 layers)``."""
    match = re.search(r"\b(\d{1,3})[- ]?layers?\b", name, re.IGNORECASE)
    return int(match[1]) if match and int(match[1]) else None
