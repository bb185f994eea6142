"""How the layers of a model are cut by tensor parallelism: a style by name of module or weight, "*" for numbers.

Styles have the names that transformers gives them, where it has them. Imported without torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from verl.errors import ConfigError

#: What each rank has of a linear map: outputs or inputs; of fused matrices, outputs of each.
STYLES = (
    "colwise",
    "colwise_gather_output",
    "packed_colwise",
    "fused_qkv",
    "rowwise",
    "rowwise_split_input",
    "moe_tp_experts",
    "replicated_with_grad_allreduce",
    "gpt2_attention",
)
#: For kinds of models of which transformers has none.
_PLANS = {
    "gpt2": {
        "h.*.attn": "gpt2_attention",
        "h.*.attn.c_attn": "fused_qkv",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}


def tensor_plan(kind: str, of_transformers: Mapping[str, str] | None) -> dict[str, str]:
    """The plan for a kind of model (`model_type`), `of_transformers` (`base_model_tp_plan`) if that has one, or ours.

    Raises:
        ConfigError: there is none, or one with a style that is unknown here.
    """
    plan = of_transformers or _PLANS.get(kind)
    if not plan:
        raise ConfigError(
            f"layout: tp does not cut models of type '{kind}': transformers has no tensor-parallel plan for them. "
            "Use shard (FSDP) or pp"
        )
    plan = {name: style for name, style in plan.items() if not style.startswith("embedding")}
    if unknown := sorted(set(plan.values()) - set(STYLES)):
        raise ConfigError(
            f"layout: tp does not cut models of type '{kind}': their plan has styles unknown here, "
            f"{', '.join(unknown)}. Use shard (FSDP) or pp"
        )
    return plan
