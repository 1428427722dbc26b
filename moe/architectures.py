"""How the fields of a config.json become the parts of a model, architecture by architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from .config_fields import Fields
from .parts import (
    Attention,
    GroupedQuery,
    Latent,
    Mixture,
    Multipliers,
    Router,
)
from .rotary_fields import amplitude_of_scores

_NORMS: dict[str, Literal["head", "row"]] = {"qwen3": "head", "qwen3_moe": "head", "olmoe": "row"}


def read_attention(architecture: str, fields: Fields) -> Attention:
    if architecture in ("deepseek_v2", "deepseek_v3"):
        return _latent(architecture, fields)
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", default=num_heads)
    head_dim = fields.count("head_dim", default=fields.count("hidden_size") // num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_attention_heads",
            f"{num_heads} is no multiple of num_key_value_heads {num_kv_heads}",
        )
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd; rotary positions need pairs")
    if fields.get("clip_qkv") is not None:
        raise fields.error("clip_qkv", "is set; clipped queries and keys are not supported")
    scale = head_dim**-0.5
    if architecture == "granitemoe":
        scale = fields.positive("attention_multiplier", default=1.0)
    return GroupedQuery(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=architecture == "qwen2_moe" and fields.flag("qkv_bias", default=True),
        norm=_NORMS.get(architecture, "none"),
        scale=scale,
    )


def _latent(architecture: str, fields: Fields) -> Latent:
    nope, rope = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    if rope % 2:
        raise fields.error("qk_rope_head_dim", f"{rope} is odd; rotary positions need pairs")
    query_latent = fields.get("q_lora_rank")
    return Latent(
        num_heads=fields.count("num_attention_heads"),
        latent_dim=fields.count("kv_lora_rank"),
        query_latent_dim=None if query_latent is None else fields.count("q_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=fields.count("v_head_dim"),
        interleaved=architecture == "deepseek_v2" or fields.flag("rope_interleave", default=True),
        scale=(nope + rope) ** -0.5 * amplitude_of_scores(fields) ** 2,
    )


def read_mixture(architecture: str, fields: Fields) -> Mixture | None:
    """The experts of a layer that has some; None for an architecture without."""
    if architecture not in _MIXTURES:
        return None
    mixture = _MIXTURES[architecture](fields)
    if mixture.router.top_k > mixture.num_experts:
        raise fields.error(
            "num_experts_per_tok",
            f"{mixture.router.top_k} is more than the {mixture.num_experts} experts there are",
        )
    return mixture


def _mixtral(fields: Fields) -> Mixture:
    return Mixture(
        num_experts=fields.count("num_experts", "num_local_experts"),
        expert_size=fields.count("intermediate_size"),
        router=_softmax(fields, normalise=True),
    )


def _qwen3_moe(fields: Fields) -> Mixture:
    return Mixture(
        num_experts=fields.count("num_experts", "num_local_experts"),
        expert_size=fields.count("moe_intermediate_size"),
        router=_softmax(fields, normalise=fields.flag("norm_topk_prob", default=False)),
    )


def _qwen2_moe(fields: Fields) -> Mixture:
    return Mixture(
        num_experts=fields.count("num_experts", "num_local_experts"),
        expert_size=fields.count("moe_intermediate_size"),
        router=_softmax(fields, normalise=fields.flag("norm_topk_prob", default=False)),
        shared_size=fields.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _olmoe(fields: Fields) -> Mixture:
    return Mixture(
        num_experts=fields.count("num_experts", "num_local_experts"),
        expert_size=fields.count("intermediate_size"),
        router=_softmax(fields, normalise=fields.flag("norm_topk_prob", default=False)),
    )


def _softmax(fields: Fields, *, normalise: bool) -> Router:
    return Router(score="softmax", top_k=fields.count("num_experts_per_tok"), normalise=normalise)


def _deepseek_v2(fields: Fields) -> Mixture:
    method = fields.choice("topk_method", "greedy", "group_limited_greedy", default="greedy")
    if fields.get("norm_topk_prob"):
        raise fields.error(
            "norm_topk_prob", "is true; for deepseek_v2 only weights as they are are supported"
        )
    if fields.get("scoring_func") not in (None, "softmax"):
        raise fields.error("scoring_func", "must be softmax for deepseek_v2")
    grouped = method == "group_limited_greedy"
    return _deepseek(
        fields,
        Router(
            score="softmax",
            top_k=fields.count("num_experts_per_tok"),
            normalise=False,
            num_groups=fields.count("n_group") if grouped else 1,
            top_groups=fields.count("topk_group") if grouped else 1,
            scale=fields.positive("routed_scaling_factor", default=1.0),
            precise=True,
        ),
    )


def _deepseek_v3(fields: Fields) -> Mixture:
    if fields.get("scoring_func") not in (None, "sigmoid"):
        raise fields.error("scoring_func", "must be sigmoid for deepseek_v3")
    fields.choice("topk_method", "noaux_tc", default="noaux_tc")
    return _deepseek(
        fields,
        Router(
            score="sigmoid",
            top_k=fields.count("num_experts_per_tok"),
            normalise=fields.flag("norm_topk_prob", default=True),
            num_groups=fields.count("n_group", default=1),
            top_groups=fields.count("topk_group", default=1),
            group_score="best two",
            bias=True,
            scale=fields.positive("routed_scaling_factor", default=1.0),
            precise=True,
        ),
    )


def _deepseek(fields: Fields, router: Router) -> Mixture:
    num_experts, size = fields.count("n_routed_experts"), fields.count("moe_intermediate_size")
    per_group, rest = divmod(num_experts, router.num_groups)
    if rest or (router.group_score == "best two" and per_group < 2):
        raise fields.error(
            "n_group", f"{router.num_groups} does not divide {num_experts} experts well"
        )
    if router.top_groups > router.num_groups or router.top_k > router.top_groups * per_group:
        raise fields.error(
            "topk_group",
            f"{router.top_groups} of {router.num_groups} groups of {per_group} experts cannot hold "
            f"{router.top_k} experts a token",
        )
    return Mixture(
        num_experts=num_experts,
        expert_size=size,
        router=router,
        shared_size=size * fields.whole("n_shared_experts", default=0),
    )


_MIXTURES: dict[str, Callable[[Fields], Mixture]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "granitemoe": _mixtral,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}


def read_moe_layers(architecture: str, fields: Fields) -> tuple[int, ...]:
    """The layers that have experts; the others are dense."""
    layers = range(fields.count("num_hidden_layers"))
    if architecture not in _MIXTURES:
        return ()
    if architecture in ("qwen2_moe", "qwen3_moe"):
        step = fields.count("decoder_sparse_step", default=1)
        dense = fields.places("mlp_only_layers")
        return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)
    if architecture in ("deepseek_v2", "deepseek_v3"):
        if fields.get("moe_layer_freq") not in (None, 1):
            raise fields.error("moe_layer_freq", "must be 1: only the first layers may be dense")
        return tuple(layers[fields.whole("first_k_dense_replace", default=0) :])
    return tuple(layers)


def read_multipliers(architecture: str, fields: Fields) -> Multipliers:
    if architecture != "granitemoe":
        return Multipliers()
    return Multipliers(
        embedding=fields.positive("embedding_multiplier", default=1.0),
        residual=fields.positive("residual_multiplier", default=1.0),
        logits=1 / fields.positive("logits_scaling", default=1.0),
    )
