"""How each family of decoders writes its shape into a ``config.json``."""

from __future__ import annotations

from dataclasses import replace

from dtslurm.planner.models.reading import LONGEST, ConfigReader, attention, window
from dtslurm.planner.models.shapes import Attention, Experts, Generic, ModelShape, Stack

QKV_BIAS = {"qwen2", "qwen2_moe"}
QK_NORM = {"qwen3", "qwen3_moe", "gemma3_text"}
NORMS = {"gemma2": 4, "gemma3_text": 4, "glm4": 4, "cohere": 1, "cohere2": 1}  # else 2 a layer
UNGATED = {"nemotron", "starcoder2"}
TIED = ("gemma", "cohere")  # where the file does not say
MIXTURES = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "grok", "olmoe", "granitemoe", "phimoe"}
# one full layer in so many, where the file lists neither layers nor pattern
PATTERNS = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4}


def _decoder(
    read: ConfigReader, name: str, hidden: int, stacks: tuple[Stack, ...], *, tied: bool = False
) -> ModelShape:
    """Return a decoder of the given layers, its vocabulary, length and head as most files name them."""
    return ModelShape(
        name,
        hidden,
        stacks,
        vocab=read.size("vocab_size"),
        seq_len=read.size("max_position_embeddings", default=4096, largest=LONGEST),
        tied=read.flag("tie_word_embeddings", tied),
    )


def llama(read: ConfigReader, name: str) -> ModelShape:
    """Return a decoder as Llama writes it: dense or a mixture, with grouped queries and gated MLPs."""
    kind = read.choice("model_type")
    hidden = read.size("hidden_size")
    both = read.flag("attention_bias", False)
    ffn = read.size("intermediate_size")
    stack = Stack(
        read.layers(),
        attention(
            read,
            hidden,
            qkv_bias=both or kind in QKV_BIAS,
            out_bias=both and not kind.startswith("glm"),
            qk_norm=kind in QK_NORM,
        ),
        ffn,
        gated=kind not in UNGATED,
        mlp_bias=read.flag("mlp_bias", False),
        norms=NORMS.get(kind, 2),
        norm_bias=kind in UNGATED,
    )
    if kind in MIXTURES:
        stack = _with_experts(read, stack, kind)
    return _decoder(read, name, hidden, _windowed(read, kind, stack), tied=kind.startswith(TIED))


def _windowed(read: ConfigReader, kind: str, stack: Stack) -> tuple[Stack, ...]:
    """Return equal layers as those with a sliding window and those without."""
    size = window(read)
    if size is None:
        return (stack,)
    types, pattern = read.values.get("layer_types"), read.values.get("sliding_window_pattern")
    if isinstance(types, list) and types:
        full = stack.count - min(stack.count, types.count("sliding_attention"))
    else:
        every = pattern if isinstance(pattern, int) and pattern > 0 else PATTERNS.get(kind, 0)
        full = stack.count // every if every else 0
    narrow = replace(stack, count=stack.count - full, attention=replace(stack.attention, window=size))
    return tuple(part for part in (narrow, replace(stack, count=full)) if part.count)


def _routing(read: ConfigReader) -> tuple[int, int]:
    """Return the number of routed experts and how many of them a token goes to."""
    count = read.size("num_local_experts", "num_experts", "n_routed_experts")
    top_k = read.size("num_experts_per_tok", "experts_per_token")
    if top_k > count:
        read.problems.append(f"num_experts_per_tok {top_k} is more than the {count} experts there are")
    return count, top_k


def _with_experts(read: ConfigReader, stack: Stack, kind: str) -> Stack:
    """Return a layer with experts in place of its MLP."""
    count, top_k = _routing(read)
    ffn = read.size("moe_intermediate_size", "intermediate_size")
    shared = read.size("shared_expert_intermediate_size", default=0, least=0)
    biased = kind == "gpt_oss"
    experts = Experts(
        count, top_k, ffn, shared_ffn=shared, router_bias=biased, shared_gate=kind == "qwen2_moe"
    )
    if biased:
        heads = replace(stack.attention, qkv_bias=True, out_bias=True, sinks=True)
        stack = replace(stack, attention=heads, mlp_bias=True)
    return replace(stack, ffn=ffn, experts=experts)


def deepseek(read: ConfigReader, name: str) -> ModelShape:
    """Return a mixture as DeepSeek writes it: the first layers dense, shared experts beside the routed.

    GLM 4.5 and its like do so with grouped queries in place of latent attention.
    """
    hidden = read.size("hidden_size")
    layers = read.layers()
    dense = min(layers, read.size("first_k_dense_replace", default=0, least=0))
    if read.choice("model_type") in {"glm4_moe", "dots1", "deepseek"}:
        heads = attention(
            read,
            hidden,
            qkv_bias=read.flag("attention_bias", False),
            qk_norm=read.flag("use_qk_norm", False),
        )
    else:
        heads = _latent(read)
    ffn = read.size("intermediate_size")
    expert = read.size("moe_intermediate_size")
    count, top_k = _routing(read)
    experts = Experts(
        count,
        top_k,
        expert,
        shared_ffn=expert * read.size("n_shared_experts", default=0, least=0),
        router_bias=read.values.get("topk_method") == "noaux_tc",
    )
    stacks = (
        Stack(dense, heads, ffn, gated=True),
        Stack(layers - dense, heads, expert, gated=True, experts=experts),
    )
    return _decoder(read, name, hidden, tuple(stack for stack in stacks if stack.count))


def _latent(read: ConfigReader) -> Attention:
    """Return multi-head latent attention."""
    heads = read.size("num_attention_heads")
    nope, rope = read.size("qk_nope_head_dim", default=128), read.size("qk_rope_head_dim", default=64)
    return Attention(
        heads,
        heads,
        nope + rope,
        read.size("v_head_dim", default=128),
        q_rank=read.size("q_lora_rank", default=0, least=0),
        kv_rank=read.size("kv_lora_rank"),
        rope_dim=rope,
    )


def llama4(read: ConfigReader, name: str) -> ModelShape:
    """Return Llama 4's decoder: every so many layers a mixture with one shared expert, the others dense."""
    hidden = read.size("hidden_size")
    layers = read.layers()
    step = read.size("interleave_moe_layer_step", default=1, largest=layers)
    heads = attention(read, hidden, qkv_bias=False)
    count, top_k = _routing(read)
    ffn = read.size("intermediate_size")
    mixture = Stack(
        layers // step, heads, ffn, gated=True, experts=Experts(count, top_k, ffn, shared_ffn=ffn)
    )
    dense = Stack(layers - layers // step, heads, read.size("intermediate_size_mlp", default=ffn), gated=True)
    return _decoder(read, name, hidden, tuple(stack for stack in (dense, mixture) if stack.count))


def gpt2(read: ConfigReader, name: str) -> ModelShape:
    """Return GPT-2 and its like; GPT-J and CodeGen have rotary positions and fewer biases."""
    rotary = read.choice("model_type") in {"gptj", "codegen"}
    hidden = read.size("n_embd", "hidden_size")
    seq_len = read.size("n_positions", "max_position_embeddings", "n_ctx", default=1024)
    heads = attention(read, hidden, qkv_bias=not rotary, out_bias=not rotary)
    if read.flag("multi_query", False):
        heads = replace(heads, kv_heads=1)
    stack = Stack(
        read.layers("n_layer", "num_hidden_layers"),
        heads,
        read.size("n_inner", "intermediate_size", default=4 * hidden),
        gated=False,
        mlp_bias=True,
        norms=1 if rotary else 2,
        norm_bias=True,
    )
    vocab = read.size("vocab_size")
    return ModelShape(
        name,
        hidden,
        (stack,),
        vocab=vocab,
        seq_len=seq_len,
        tied=read.flag("tie_word_embeddings", not rotary),
        positions=0 if rotary else seq_len * hidden,
        extra_params=vocab if rotary else 0,
    )


def neox(read: ConfigReader, name: str) -> ModelShape:
    """Return GPT-NeoX and its contemporaries: plain MLPs, LayerNorm, biases nearly everywhere."""
    kind = read.choice("model_type")
    hidden = read.size("hidden_size", "n_embed", "d_model")
    biased = kind not in {"mpt", "falcon"}
    heads = attention(read, hidden, qkv_bias=biased, out_bias=biased)
    if kind == "falcon":
        heads = replace(heads, kv_heads=_falcon_heads(read, heads.heads))
    seq_len = read.size("max_position_embeddings", "seq_length", "max_seq_len", default=2048)
    tied = {"gpt_neox": False, "phi": False}.get(kind, True)
    stack = Stack(
        read.layers("num_hidden_layers", "n_layer", "n_layers"),
        heads,
        read.size("intermediate_size", "ffn_dim", "ffn_hidden_size", default=4 * hidden),
        gated=False,
        mlp_bias=biased,
        norms=1 if kind == "phi" or (kind == "falcon" and heads.kv_heads == 1) else 2,
        norm_bias=kind != "mpt",
    )
    vocab = read.size("vocab_size")
    return ModelShape(
        name,
        hidden,
        (stack,),
        vocab=vocab,
        seq_len=seq_len,
        tied=read.flag("tie_word_embeddings", tied),
        positions=(seq_len + 2) * hidden if kind == "opt" else 0,
        extra_params=vocab if kind == "phi" else 0,
        final_norms=2 if kind == "bloom" else 1,
    )


def _falcon_heads(read: ConfigReader, heads: int) -> int:
    """Return Falcon's key-value heads: one in its first architecture, those it names in the later one."""
    if read.flag("new_decoder_architecture", False):
        return read.size("num_kv_heads", default=heads, largest=heads)
    return 1 if read.flag("multi_query", True) else heads


def generic(read: ConfigReader, name: str) -> ModelShape:
    """Return a model known by its totals alone."""
    totals = Generic(
        int(read.number("parameters")), read.number("forward_flops"), read.number("activation_bytes")
    )
    return ModelShape(name, 0, (), seq_len=1, head=False, generic=totals)
