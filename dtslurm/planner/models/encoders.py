"""Readers for the ``config.json`` of encoders, encoder-decoders and vision transformers."""

from __future__ import annotations

from collections.abc import Mapping

from dtslurm.planner.models.reading import ConfigReader, attention
from dtslurm.planner.models.shapes import Attention, ModelShape, Stack


def bert(config: ConfigReader, name: str) -> ModelShape:
    """Read an encoder in BERT's format; ModernBERT has gated MLPs, rotary positions and no biases."""
    kind = config.choice("model_type")
    is_modernbert = kind == "modernbert"
    hidden = config.size("hidden_size", "dim")
    seq_len = config.size("max_position_embeddings", default=512)
    stack = Stack(
        config.layers("num_hidden_layers", "n_layers"),
        attention(config, hidden, qkv_bias=not is_modernbert, out_bias=not is_modernbert, causal=False),
        config.size("intermediate_size", "hidden_dim"),
        gated=is_modernbert,
        mlp_bias=not is_modernbert,
        norm_bias=not is_modernbert,
    )
    types = config.size("type_vocab_size", default=0, smallest=0)
    pooler_params = 0 if is_modernbert or kind == "distilbert" else hidden * hidden + hidden
    return ModelShape(
        name,
        hidden,
        (stack,),
        vocab=config.size("vocab_size"),
        seq_len=seq_len,
        tied=True,
        positions=0 if is_modernbert else seq_len * hidden,
        extra_params=types * hidden + pooler_params,
    )


def vit(config: ConfigReader, name: str) -> ModelShape:
    """Read a vision transformer; its tokens are the patches of an image and a class token."""
    hidden = config.size("hidden_size")
    image, patch = config.size("image_size", default=224), config.size("patch_size", default=16)
    channels = config.size("num_channels", default=3)
    if patch > image:
        config.problems.append(f"patch_size {patch} is larger than image_size {image}")
    tokens = (image // patch) ** 2 + 1
    stack = Stack(
        config.layers(),
        attention(config, hidden, qkv_bias=True, out_bias=True, causal=False),
        config.size("intermediate_size", default=hidden * config.size("mlp_ratio", default=4)),
        gated=False,
        mlp_bias=True,
        norm_bias=True,
    )
    labels = config.values.get("id2label")
    classes = len(labels) if isinstance(labels, Mapping) else config.size("num_labels", default=1000)
    extra_params = channels * patch * patch * hidden + hidden + hidden + classes * (hidden + 1)
    return ModelShape(
        name,
        hidden,
        (stack,),
        seq_len=tokens,
        head=False,
        positions=tokens * hidden,
        extra_params=extra_params,
    )


def t5(config: ConfigReader, name: str) -> ModelShape:
    """Read an encoder-decoder in T5's format: relative positions, no biases."""
    hidden = config.size("d_model")
    heads, head_width = config.size("num_heads"), config.size("d_kv")
    layers = config.layers("num_layers")
    gated = config.choice("feed_forward_proj").startswith("gated")
    ffn = config.size("d_ff")
    encoder = Stack(
        layers, Attention(heads, heads, head_width, head_width, causal=False), ffn, gated, encoder=True
    )
    decoder = Stack(
        config.layers("num_decoder_layers", default=layers),
        Attention(heads, heads, head_width, head_width),
        ffn,
        gated,
        norms=3,
        cross=True,
    )
    buckets = config.size("relative_attention_num_buckets", default=32) * heads * 2
    return ModelShape(
        name,
        hidden,
        (encoder, decoder),
        vocab=config.size("vocab_size"),
        seq_len=config.size("n_positions", default=512),
        tied=config.flag("tie_word_embeddings", True),
        extra_params=buckets,
        final_norms=2,
    )


def bart(config: ConfigReader, name: str) -> ModelShape:
    """Read an encoder-decoder in BART's format: learned positions on both sides, biases in all layers."""
    hidden = config.size("d_model")
    seq_len = config.size("max_position_embeddings", "max_source_positions", default=1024)
    target_len = config.size("max_target_positions", default=seq_len)

    def stack(side: str, *, decodes: bool) -> Stack:
        heads = attention(
            config,
            hidden,
            heads=(f"{side}_attention_heads",),
            qkv_bias=True,
            out_bias=True,
            causal=decodes,
        )
        return Stack(
            config.layers(f"{side}_layers"),
            heads,
            config.size(f"{side}_ffn_dim"),
            gated=False,
            mlp_bias=True,
            norms=3 if decodes else 2,
            norm_bias=True,
            cross=decodes,
            encoder=not decodes,
        )

    return ModelShape(
        name,
        hidden,
        (stack("encoder", decodes=False), stack("decoder", decodes=True)),
        vocab=config.size("vocab_size"),
        seq_len=seq_len,
        tied=config.flag("tie_word_embeddings", True),
        positions=(seq_len + target_len + 4) * hidden,
        final_norms=2,
    )
