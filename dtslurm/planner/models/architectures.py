"""Readers for the ``config.json`` of each family of decoders."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.planner.models.reading import LONGEST, ConfigReader, attention, window
from dtslurm.planner.models.shapes import Attention, Experts, Generic, ModelShape, Stack

QKV_BIAS = {"qwen2", "qwen2_moe"}
QK_NORM = {"qwen3", "qwen3_moe", "gemma3_text"}
# norms per layer, 2 for other types
NORMS = {"gemma2": 4, "gemma3_text": 4, "glm4": 4, "cohere": 1, "cohere2": 1}
UNGATED = {"nemotron", "starcoder2"}
TIED = ("gemma", "cohere")  # tied embeddings by default, if the file does not state it
MIXTURES = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "grok", "olmoe", "granitemoe", "phimoe"}
# One full-attention layer in this many, if the file lists neither layers nor a pattern.
PATTERNS = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4}


def _build_decoder(
    config: ConfigReader, name: str, hidden_size: int, stacks: tuple[Stack, ...], *, tied: bool = False
) -> ModelShape:
    """Return a decoder with the given layers, and vocabulary, length and head under their usual keys."""
    return ModelShape(
        name,
        hidden_size,
        stacks,
        vocab=config.size("vocab_size"),
        seq_len=config.size("max_position_embeddings", default=4096, largest=LONGEST),
        tied=config.flag("tie_word_embeddings", tied),
    )


def llama(config: ConfigReader, name: str) -> ModelShape:
    """Read a decoder in Llama's format: dense or MoE, with grouped queries and gated MLPs."""
    kind = config.choice("model_type")
    hidden = config.size("hidden_size")
    has_attention_bias = config.flag("attention_bias", False)
    ffn = config.size("intermediate_size")
    attention_shape = attention(
        config,
        hidden,
        qkv_bias=has_attention_bias or kind in QKV_BIAS,
        out_bias=has_attention_bias and not kind.startswith("glm"),
    )
    stack = Stack(
        config.layers(),
        replace(attention_shape, qk_norm=kind in QK_NORM),
        ffn,
        gated=kind not in UNGATED,
        mlp_bias=config.flag("mlp_bias", False),
        norms=NORMS.get(kind, 2),
        norm_bias=kind in UNGATED,
    )
    if kind in MIXTURES:
        stack = _with_experts(config, stack, kind)
    return _build_decoder(
        config, name, hidden, _split_by_window(config, kind, stack), tied=kind.startswith(TIED)
    )


def _split_by_window(config: ConfigReader, kind: str, stack: Stack) -> tuple[Stack, ...]:
    """Split a stack into layers with a sliding window and layers without."""
    size = window(config)
    if size is None:
        return (stack,)
    types, pattern = config.values.get("layer_types"), config.values.get("sliding_window_pattern")
    if isinstance(types, list) and types:
        full_count = stack.count - min(stack.count, types.count("sliding_attention"))
    else:
        every = pattern if isinstance(pattern, int) and pattern > 0 else PATTERNS.get(kind, 0)
        full_count = stack.count // every if every else 0
    windowed = replace(stack, count=stack.count - full_count, attention=replace(stack.attention, window=size))
    return tuple(
        layer_group for layer_group in (windowed, replace(stack, count=full_count)) if layer_group.count
    )


def _read_routing(config: ConfigReader) -> tuple[int, int]:
    """Read the number of routed experts and the number of experts per token."""
    count = config.size("num_local_experts", "num_experts", "n_routed_experts")
    top_k = config.size("num_experts_per_tok", "experts_per_token")
    if top_k > count:
        config.problems.append(f"num_experts_per_tok {top_k} is more than the {count} experts there are")
    return count, top_k


def _with_experts(config: ConfigReader, stack: Stack, kind: str) -> Stack:
    """Return a stack with experts in place of the MLP."""
    count, top_k = _read_routing(config)
    ffn = config.size("moe_intermediate_size", "intermediate_size")
    shared = config.size("shared_expert_intermediate_size", default=0, smallest=0)
    has_bias = kind == "gpt_oss"
    experts = Experts(
        count, top_k, ffn, shared_ffn=shared, router_bias=has_bias, shared_gate=kind == "qwen2_moe"
    )
    if has_bias:
        attention_shape = replace(stack.attention, qkv_bias=True, out_bias=True, sinks=True)
        stack = replace(stack, attention=attention_shape, mlp_bias=True)
    return replace(stack, ffn=ffn, experts=experts)


def deepseek(config: ConfigReader, name: str) -> ModelShape:
    """Read an MoE model in DeepSeek's format: first layers dense, shared experts in addition to routed ones.

    GLM 4.5 and similar models use this format with grouped queries instead of latent attention.
    """
    hidden = config.size("hidden_size")
    layers = config.layers()
    dense_layers = min(layers, config.size("first_k_dense_replace", default=0, smallest=0))
    if config.choice("model_type") in {"glm4_moe", "dots1", "deepseek"}:
        attention_shape = replace(
            attention(config, hidden, qkv_bias=config.flag("attention_bias", False)),
            qk_norm=config.flag("use_qk_norm", False),
        )
    else:
        attention_shape = _read_latent_attention(config)
    ffn = config.size("intermediate_size")
    expert_ffn = config.size("moe_intermediate_size")
    count, top_k = _read_routing(config)
    experts = Experts(
        count,
        top_k,
        expert_ffn,
        shared_ffn=expert_ffn * config.size("n_shared_experts", default=0, smallest=0),
        router_bias=config.values.get("topk_method") == "noaux_tc",
    )
    stacks = (
        Stack(dense_layers, attention_shape, ffn, gated=True),
        Stack(layers - dense_layers, attention_shape, expert_ffn, gated=True, experts=experts),
    )
    return _build_decoder(config, name, hidden, tuple(stack for stack in stacks if stack.count))


def _read_latent_attention(config: ConfigReader) -> Attention:
    """Read multi-head latent attention."""
    heads = config.size("num_attention_heads")
    nope, rope = config.size("qk_nope_head_dim", default=128), config.size("qk_rope_head_dim", default=64)
    return Attention(
        heads,
        heads,
        nope + rope,
        config.size("v_head_dim", default=128),
        q_rank=config.size("q_lora_rank", default=0, smallest=0),
        kv_rank=config.size("kv_lora_rank"),
        rope_dim=rope,
    )


def llama4(config: ConfigReader, name: str) -> ModelShape:
    """Read Llama 4's decoder: every n-th layer is MoE with one shared expert, the others are dense."""
    hidden = config.size("hidden_size")
    layers = config.layers()
    step = config.size("interleave_moe_layer_step", default=1, largest=layers)
    attention_shape = attention(config, hidden, qkv_bias=False)
    count, top_k = _read_routing(config)
    ffn = config.size("intermediate_size")
    moe_stack = Stack(
        layers // step, attention_shape, ffn, gated=True, experts=Experts(count, top_k, ffn, shared_ffn=ffn)
    )
    dense_stack = Stack(
        layers - layers // step,
        attention_shape,
        config.size("intermediate_size_mlp", default=ffn),
        gated=True,
    )
    return _build_decoder(
        config, name, hidden, tuple(stack for stack in (dense_stack, moe_stack) if stack.count)
    )


def gpt2(config: ConfigReader, name: str) -> ModelShape:
    """Read GPT-2 and similar models; GPT-J and CodeGen have rotary positions and fewer biases."""
    rotary = config.choice("model_type") in {"gptj", "codegen"}
    hidden = config.size("n_embd", "hidden_size")
    seq_len = config.size("n_positions", "max_position_embeddings", "n_ctx", default=1024)
    attention_shape = attention(config, hidden, qkv_bias=not rotary, out_bias=not rotary)
    if config.flag("multi_query", False):
        attention_shape = replace(attention_shape, kv_heads=1)
    stack = Stack(
        config.layers("n_layer", "num_hidden_layers"),
        attention_shape,
        config.size("n_inner", "intermediate_size", default=4 * hidden),
        gated=False,
        mlp_bias=True,
        norms=1 if rotary else 2,
        norm_bias=True,
    )
    vocab = config.size("vocab_size")
    return ModelShape(
        name,
        hidden,
        (stack,),
        vocab=vocab,
        seq_len=seq_len,
        tied=config.flag("tie_word_embeddings", not rotary),
        positions=0 if rotary else seq_len * hidden,
        extra_params=vocab if rotary else 0,
    )


def neox(config: ConfigReader, name: str) -> ModelShape:
    """Read GPT-NeoX and similar models: plain MLPs, LayerNorm, and biases in most layers."""
    kind = config.choice("model_type")
    hidden = config.size("hidden_size", "n_embed", "d_model")
    has_bias = kind not in {"mpt", "falcon"}
    attention_shape = attention(config, hidden, qkv_bias=has_bias, out_bias=has_bias)
    if kind == "falcon":
        attention_shape = replace(
            attention_shape, kv_heads=_read_falcon_kv_heads(config, attention_shape.heads)
        )
    seq_len = config.size("max_position_embeddings", "seq_length", "max_seq_len", default=2048)
    tied = {"gpt_neox": False, "phi": False}.get(kind, True)
    stack = Stack(
        config.layers("num_hidden_layers", "n_layer", "n_layers"),
        attention_shape,
        config.size("intermediate_size", "ffn_dim", "ffn_hidden_size", default=4 * hidden),
        gated=False,
        mlp_bias=has_bias,
        norms=1 if kind == "phi" or (kind == "falcon" and attention_shape.kv_heads == 1) else 2,
        norm_bias=kind != "mpt",
    )
    vocab = config.size("vocab_size")
    return ModelShape(
        name,
        hidden,
        (stack,),
        vocab=vocab,
        seq_len=seq_len,
        tied=config.flag("tie_word_embeddings", tied),
        positions=(seq_len + 2) * hidden if kind == "opt" else 0,
        extra_params=vocab if kind == "phi" else 0,
        final_norms=2 if kind == "bloom" else 1,
    )


def _read_falcon_kv_heads(config: ConfigReader, heads: int) -> int:
    """Read Falcon's number of key-value heads: 1 in its first architecture, configurable in the later one."""
    if config.flag("new_decoder_architecture", False):
        return config.size("num_kv_heads", default=heads, largest=heads)
    return 1 if config.flag("multi_query", True) else heads


def generic(config: ConfigReader, name: str) -> ModelShape:
    """Read a model given only by its totals."""
    totals = Generic(
        int(config.number("parameters")), config.number("forward_flops"), config.number("activation_bytes")
    )
    return ModelShape(name, 0, (), seq_len=1, head=False, generic=totals)
