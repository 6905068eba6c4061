"""Read a Hugging Face ``config.json`` into a :class:`~dtslurm.planner.models.shapes.ModelShape`.

Transformers is not needed. ``model_type`` selects the reader of the architecture. Missing keys have the
default of transformers' config class for that type. All problems are reported together as a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dtslurm.planner.models import architectures, encoders
from dtslurm.planner.models.reading import ConfigReader
from dtslurm.planner.models.shapes import ModelShape


class ConfigProblem(ValueError):
    """An invalid config.json; ``problems`` lists all errors."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


_READERS: Mapping[str, Callable[[ConfigReader, str], ModelShape]] = {
    **dict.fromkeys(
        (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3_text",
            "nemotron",
            "starcoder2",
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
            "gpt_oss",
            "grok",
            "internlm2",
            "yi",
            "phi3",
            "olmo",
            "olmo2",
            "smollm3",
            "glm",
            "glm4",
            "granite",
            "cohere",
            "cohere2",
            "ministral",
            "seed_oss",
            "olmoe",
            "granitemoe",
            "phimoe",
        ),
        architectures.llama,
    ),
    **dict.fromkeys(
        ("deepseek", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "dots1"), architectures.deepseek
    ),
    "llama4_text": architectures.llama4,
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "codegen"), architectures.gpt2),
    **dict.fromkeys(("gpt_neox", "bloom", "opt", "mpt", "falcon", "phi"), architectures.neox),
    **dict.fromkeys(
        ("bert", "roberta", "electra", "xlm-roberta", "camembert", "distilbert", "modernbert"), encoders.bert
    ),
    **dict.fromkeys(
        ("vit", "deit", "dinov2", "vit_mae", "clip_vision_model", "siglip_vision_model"), encoders.vit
    ),
    **dict.fromkeys(("t5", "mt5", "umt5"), encoders.t5),
    **dict.fromkeys(("bart", "mbart", "m2m_100", "pegasus", "marian", "whisper"), encoders.bart),
    "generic": architectures.generic,
}
KNOWN = tuple(sorted(_READERS))


def _is_known(kind: object) -> bool:
    return isinstance(kind, str) and kind in _READERS


def read_config(values: object, name: str) -> ModelShape:
    """Return the model shape that a parsed ``config.json`` describes.

    Raises:
        ConfigProblem: the file is invalid; the exception lists all errors.
    """
    if not isinstance(values, Mapping):
        raise ConfigProblem(["the file should hold one JSON object, as Hugging Face's config.json does"])
    kind = values.get("model_type")
    text_config = values.get("text_config")
    if not _is_known(kind) and isinstance(text_config, Mapping) and _is_known(text_config.get("model_type")):
        return read_config(text_config, name)  # the language model of a multimodal model
    if not isinstance(kind, str) or not _is_known(kind):
        problem = f"model_type {kind!r} is not known" if kind is not None else "model_type is missing"
        raise ConfigProblem(
            [
                (
                    f"{problem}; known are {', '.join(KNOWN)}. For another architecture give model_type "
                    '"generic" with parameters, forward_flops and activation_bytes of one sample'
                )
            ]
        )
    reader = ConfigReader(values)
    shape = _READERS[kind](reader, name)
    if reader.problems:
        raise ConfigProblem(reader.problems)
    return shape
