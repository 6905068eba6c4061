"""How each family of architectures writes its shape into a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtslurm.planner.shapes import Attention, Experts, Generic, ModelShape, Stack

LARGEST = {"layers": 100_000, "width": 10_000_000}


class Reader:
    """Takes numbers out of a config and collects what is wrong with them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.problems: list[str] = []
        self.spoilt: set[str] = set()

    def size(
        self, *names: str, default: int | None = None, largest: int = LARGEST["width"], least: int = 1
    ) -> int:
        """Return the first of the named integers that is there, checked to lie in a sane range."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            if isinstance(value, bool) or not whole:
                self.problems.append(f"{name} should be a whole number, not {value!r}")
            elif not least <= value <= largest:
                self.problems.append(f"{name} should be {least} to {largest}, not {value!r}")
            else:
                return int(value)
            self.spoilt.add(name)
            return default or max(least, 1)
        if default is None:
            self.problems.append(f"{names[0]} is missing; it should be a whole number")
            self.spoilt.add(names[0])
            return max(least, 1)
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{name} should be true or false, not {value!r}")
            return default
        return value

    def number(self, name: str) -> float:
        """Return a positive number."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self.problems.append(f"{name} should be a positive number, not {value!r}")
            return 1.0
        return float(value)


def _attention(
    read: Reader, hidden: int, *, qkv_bias: bool, out_bias: bool, qk_norm: bool = False
) -> Attention:
    heads = read.size("num_attention_heads", "n_head", "n_heads")
    kv_heads = read.size("num_key_value_heads", default=heads)
    if "head_dim" not in read.values or read.values["head_dim"] is None:
        if hidden % heads and "hidden_size" not in read.spoilt:
            near = [count for count in range(1, min(hidden, 4096) + 1) if hidden % count == 0]
            best = min(near, key=lambda count: abs(count - heads))
            read.problems.append(
                f"num_attention_heads {heads} does not divide hidden_size {hidden}; {best} would, "
                "or give head_dim"
            )
        width = max(1, hidden // heads)
    else:
        width = read.size("head_dim")
    if heads % kv_heads:
        read.problems.append(
            f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}; "
            f"valid: {_divisors(heads)}"
        )
    window = read.values.get("sliding_window") if read.values.get("use_sliding_window", True) else None
    window = window if isinstance(window, int) and window > 0 else None
    return Attention(
        heads, kv_heads, width, width, qkv_bias=qkv_bias, out_bias=out_bias, qk_norm=qk_norm, window=window
    )


def _divisors(number: int) -> str:
    found = [str(count) for count in range(1, min(number, 4096) + 1) if number % count == 0]
    return ", ".join(found if len(found) <= 12 else [*found[:11], "…"])


def llama(read: Reader, name: str) -> ModelShape:
    """Return the shape of such a model."""
    kind = read.values.get("model_type")
    hidden = read.size("hidden_size")
    layers = read.size("num_hidden_layers", largest=LARGEST["layers"])
    both = read.flag("attention_bias", False)
    qkv_bias = both or (kind in {"qwen2", "qwen2_moe"})
    attention = _attention(
        read, hidden, qkv_bias=qkv_bias, out_bias=both, qk_norm=kind in {"qwen3", "qwen3_moe", "gemma3_text"}
    )
    norms = 4 if kind in {"gemma2", "gemma3_text"} else 2
    ffn = read.size("intermediate_size")
    tied = read.flag("tie_word_embeddings", str(kind).startswith("gemma"))
    gated = kind not in {"nemotron", "starcoder2"}
    stack = Stack(
        layers, attention, ffn, gated, mlp_bias=read.flag("mlp_bias", False), norms=norms, norm_bias=not gated
    )
    stacks: tuple[Stack, ...] = (stack,)
    if kind in {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "grok"}:
        stacks = (_with_experts(read, stack, str(kind)),)
    return ModelShape(
        name,
        hidden,
        stacks,
        vocab=read.size("vocab_size"),
        seq_len=read.size("max_position_embeddings", default=4096),
        tied=tied,
    )


def _with_experts(read: Reader, stack: Stack, kind: str) -> Stack:
    count = read.size("num_local_experts", "num_experts", "n_routed_experts")
    top_k = read.size("num_experts_per_tok", "experts_per_token")
    if top_k > count:
        read.problems.append(f"num_experts_per_tok {top_k} is more than the {count} experts there are")
    ffn = read.size("moe_intermediate_size", "intermediate_size")
    shared = read.size("shared_expert_intermediate_size", default=0, least=0)
    experts = Experts(
        count, top_k, ffn, shared_ffn=shared, router_bias=kind == "gpt_oss", shared_gate=kind == "qwen2_moe"
    )
    bias = kind == "gpt_oss"
    attention = stack.attention
    if bias:
        attention = Attention(
            attention.heads,
            attention.kv_heads,
            attention.head_dim,
            attention.value_dim,
            qkv_bias=True,
            out_bias=True,
            sinks=True,
        )
    return Stack(
        stack.count,
        attention,
        experts.ffn,
        stack.gated,
        experts=experts,
        mlp_bias=bias or stack.mlp_bias,
        norms=stack.norms,
        norm_bias=stack.norm_bias,
    )


def deepseek(read: Reader, name: str) -> ModelShape:
    """Return the shape of such a model."""
    hidden = read.size("hidden_size")
    layers = read.size("num_hidden_layers", largest=LARGEST["layers"])
    dense = min(layers, read.size("first_k_dense_replace", default=0, least=0))
    heads = read.size("num_attention_heads")
    nope, rope = read.size("qk_nope_head_dim", default=128), read.size("qk_rope_head_dim", default=64)
    attention = Attention(
        heads,
        heads,
        nope + rope,
        read.size("v_head_dim", default=128),
        q_rank=read.size("q_lora_rank", default=0, least=0),
        kv_rank=read.size("kv_lora_rank"),
        rope_dim=rope,
    )
    ffn = read.size("intermediate_size")
    expert = read.size("moe_intermediate_size")
    count, top_k = read.size("n_routed_experts"), read.size("num_experts_per_tok")
    if top_k > count:
        read.problems.append(f"num_experts_per_tok {top_k} is more than the {count} experts there are")
    experts = Experts(
        count,
        top_k,
        expert,
        shared_ffn=expert * read.size("n_shared_experts", default=0, least=0),
        router_bias=read.values.get("topk_method") == "noaux_tc",
    )
    stacks: tuple[Stack, ...] = (Stack(dense, attention, ffn, gated=True),) if dense else ()
    stacks += (Stack(layers - dense, attention, expert, gated=True, experts=experts),)
    return ModelShape(
        name,
        hidden,
        stacks,
        vocab=read.size("vocab_size"),
        seq_len=read.size("max_position_embeddings", default=4096),
        tied=read.flag("tie_word_embeddings", False),
    )


def gpt2(read: Reader, name: str) -> ModelShape:
    """Return the shape of such a model."""
    hidden = read.size("n_embd", "hidden_size")
    layers = read.size("n_layer", "num_hidden_layers", largest=LARGEST["layers"])
    attention = _attention(read, hidden, qkv_bias=True, out_bias=True)
    seq_len = read.size("n_positions", "max_position_embeddings", "n_ctx", default=1024)
    stack = Stack(
        layers,
        attention,
        read.size("n_inner", "intermediate_size", default=4 * hidden),
        gated=False,
        mlp_bias=True,
        norm_bias=True,
    )
    return ModelShape(
        name,
        hidden,
        (stack,),
        vocab=read.size("vocab_size"),
        seq_len=seq_len,
        tied=read.flag("tie_word_embeddings", True),
        positions=seq_len * hidden,
    )


def neox(read: Reader, name: str) -> ModelShape:
    """Return the shape of such a model."""
    kind = read.values.get("model_type")
    hidden = read.size("hidden_size", "n_embed", "d_model")
    layers = read.size("num_hidden_layers", "n_layer", "n_layers", largest=LARGEST["layers"])
    bias = kind != "mpt"
    attention = _attention(read, hidden, qkv_bias=bias, out_bias=bias)
    seq_len = read.size("max_position_embeddings", "seq_length", "max_seq_len", default=2048)
    learned = kind == "opt"
    stack = Stack(
        layers,
        attention,
        read.size("intermediate_size", "ffn_dim", default=4 * hidden),
        gated=False,
        mlp_bias=bias,
        norm_bias=kind != "mpt",
    )
    return ModelShape(
        name,
        hidden,
        (stack,),
        vocab=read.size("vocab_size"),
        seq_len=seq_len,
        tied=read.flag("tie_word_embeddings", kind != "gpt_neox"),
        positions=(seq_len + 2) * hidden if learned else 0,
        final_norms=2 if kind == "bloom" else 1,
    )


def bert(read: Reader, name: str) -> ModelShape:
    """Return the shape of such a model."""
    hidden = read.size("hidden_size", "dim")
    seq_len = read.size("max_position_embeddings", default=512)
    attention = _attention(read, hidden, qkv_bias=True, out_bias=True)
    attention = Attention(
        attention.heads,
        attention.kv_heads,
        attention.head_dim,
        attention.value_dim,
        qkv_bias=True,
        out_bias=True,
        causal=False,
    )
    stack = Stack(
        read.size("num_hidden_layers", "n_layers", largest=LARGEST["layers"]),
        attention,
        read.size("intermediate_size", "hidden_dim"),
        gated=False,
        mlp_bias=True,
        norm_bias=True,
    )
    types = read.size("type_vocab_size", default=0, least=0)
    pooler = hidden * hidden + hidden
    return ModelShape(
        name,
        hidden,
        (stack,),
        vocab=read.size("vocab_size"),
        seq_len=seq_len,
        tied=True,
        positions=seq_len * hidden,
        extra_params=types * hidden + pooler,
    )


def vit(read: Reader, name: str) -> ModelShape:
    """Return the shape of such a model."""
    hidden = read.size("hidden_size")
    image, patch = read.size("image_size", default=224), read.size("patch_size", default=16)
    channels = read.size("num_channels", default=3)
    if patch > image:
        read.problems.append(f"patch_size {patch} is larger than image_size {image}")
    tokens = (image // patch) ** 2 + 1
    heads = read.size("num_attention_heads")
    attention = Attention(
        heads,
        heads,
        max(1, hidden // heads),
        max(1, hidden // heads),
        qkv_bias=True,
        out_bias=True,
        causal=False,
    )
    stack = Stack(
        read.size("num_hidden_layers", largest=LARGEST["layers"]),
        attention,
        read.size("intermediate_size"),
        gated=False,
        mlp_bias=True,
        norm_bias=True,
    )
    labels = read.values.get("id2label")
    classes = len(labels) if isinstance(labels, Mapping) else read.size("num_labels", default=1000)
    extra = channels * patch * patch * hidden + hidden + hidden + classes * (hidden + 1)
    return ModelShape(
        name, hidden, (stack,), seq_len=tokens, head=False, positions=tokens * hidden, extra_params=extra
    )


def t5(read: Reader, name: str) -> ModelShape:
    """Return the shape of such a model."""
    hidden = read.size("d_model")
    heads, width = read.size("num_heads"), read.size("d_kv")
    layers = read.size("num_layers", largest=LARGEST["layers"])
    gated = str(read.values.get("feed_forward_proj", "relu")).startswith("gated")
    ffn = read.size("d_ff")
    two_way = Attention(heads, heads, width, width, causal=False)
    encoder = Stack(layers, two_way, ffn, gated, encoder=True)
    decoder = Stack(
        read.size("num_decoder_layers", default=layers),
        Attention(heads, heads, width, width),
        ffn,
        gated,
        norms=3,
        cross=True,
    )
    buckets = read.size("relative_attention_num_buckets", default=32) * heads * 2
    return ModelShape(
        name,
        hidden,
        (encoder, decoder),
        vocab=read.size("vocab_size"),
        seq_len=read.size("n_positions", default=512),
        tied=read.flag("tie_word_embeddings", True),
        extra_params=buckets,
        final_norms=2,
    )


def generic(read: Reader, name: str) -> ModelShape:
    """Return the shape of such a model."""
    generic = Generic(
        int(read.number("parameters")), read.number("forward_flops"), read.number("activation_bytes")
    )
    return ModelShape(name, 0, (), seq_len=1, head=False, generic=generic)
