"""The algorithm that TRL's arguments name."""

from __future__ import annotations

import logging
from typing import Any

from verl._host.ranks import torchrun_ranks
from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.errors import ConfigError, nearest

logger = logging.getLogger(__name__)

#: TRL's `loss_type` -> how token losses become one number here.
_AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}
#: TRL's `loss_type` that is an algorithm here -> its aggregation, and its arguments without their first word.
_OWN = {
    "sapo": ("seq-mean-token-mean", ("temperature_pos", "temperature_neg")),
    "vespo": ("token-mean", ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),
}
#: What TRL adds to the standard deviation of rewards.
_STD_EPSILON = 1e-4
#: TRL's `loss_type` of pairs -> ours.
_PAIRS = {name: name for name in (
    "sigmoid", "sigmoid_norm", "hinge", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "aot",
)} | {"robust": "sigmoid"}  # fmt: skip
#: Those that are algorithms of their own here.
_OTHERS = ("ipo", "sft")


def grpo_algorithm(args: Any) -> BaseAlgorithm:
    """Raises ConfigError for an unknown loss, or an argument that it does not read."""
    norm = {"group": True, "none": False}.get(args.scale_rewards, args.scale_rewards)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    options: dict[str, Any] = {"norm_adv_by_std": norm, "entropy_coeff": args.entropy_coef}
    if norm:
        options["std_epsilon"] = _STD_EPSILON
    if args.beta:
        options |= {"kl_in": "loss", "kl_coef": args.beta, "kl_by_ratio": args.use_bias_correction_kl}
    options |= _correction(args)
    if args.entropy_coef and args.loss_type not in ("dapo", "bnpo", "cispo"):
        raise ConfigError(
            f"entropy_coef with loss_type='{args.loss_type}': TRL's bonus is a mean over tokens, and ours is not: "
            "take loss_type='dapo'"
        )
    unread = [f"{name}_{word}" for name, (_, words) in _OWN.items() if name != args.loss_type for word in words]
    if args.loss_type in (*_OWN, "cispo"):
        unread += ["epsilon", "delta", "importance_sampling_level"]
    _refuse_unread(args, f"loss_type='{args.loss_type}'", *unread)
    if args.loss_type in _OWN:
        return _own_loss(args, options)
    if args.loss_type == "cispo":
        return make_algorithm("cispo", **options, clip_ratio_low=1.0, clip_ratio_high=high - 1)
    if args.loss_type not in _AGGREGATION:
        raise ConfigError(f"loss_type='{args.loss_type}': {nearest(args.loss_type, [*_AGGREGATION, *_OWN, 'cispo'])}")
    options |= {"clip_ratio_low": args.epsilon, "clip_ratio_high": high}
    options |= {"loss_agg_mode": _AGGREGATION[args.loss_type]}
    if args.loss_type == "dr_grpo":
        options |= {"loss_scale_factor": float(args.max_completion_length)}
    if args.importance_sampling_level == "sequence":
        _refuse_unread(args, "importance_sampling_level='sequence'", "delta")
        if args.loss_type not in ("grpo", "luspo"):
            logger.warning(
                "importance_sampling_level='sequence' with loss_type='%s' weights each sequence by its completion "
                "length: GSPO's loss is loss_type='grpo'",
                args.loss_type,
            )
        return make_algorithm("gspo", **options)
    return make_algorithm("grpo", **options, clip_ratio_c=args.delta)


def _own_loss(args: Any, options: dict[str, Any]) -> BaseAlgorithm:
    name = args.loss_type
    _refuse_unread(args, f"loss_type='{name}'", "epsilon_high")
    if name == "vespo" and args.use_vllm and args.vllm_importance_sampling_correction:
        raise ConfigError(
            "loss_type='vespo' with use_vllm: TRL's weight of a sequence has the engine's ratio within, and ours has "
            "it beside: set vllm_importance_sampling_correction=False"
        )
    mode, names = _OWN[name]
    return make_algorithm(
        name, **options, loss_agg_mode=mode, **{word: getattr(args, f"{name}_{word}") for word in names}
    )


def rloo_algorithm(args: Any) -> BaseAlgorithm:
    """Of whole responses, with their KL to the reference in the reward."""
    options: dict[str, Any] = {"kl_in": "reward", "kl_coef": args.beta} if args.beta else {}
    if args.normalize_advantages:
        options["std_epsilon"] = _STD_EPSILON
    return make_algorithm(
        "rloo",
        ratio_of="sequence",
        loss_agg_mode="seq-mean-token-mean",
        clip_ratio_low=args.epsilon,
        clip_ratio_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        clip_ratio_c=None,
        rollout_is=None,
        **options,
    )


def _correction(args: Any) -> dict[str, Any]:
    """Options of the weights between engine and trainer: masked ones are 0 outside of their bounds."""
    if not args.vllm_importance_sampling_correction:
        return {"rollout_is": None}
    level, _, kind = args.vllm_importance_sampling_mode.partition("_")
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if kind == "truncate" and low is not None:
        raise ConfigError(
            f"vllm_importance_sampling_clip_min={low} goes with the mode {level}_mask alone: leave it out"
        )
    options = {"rollout_is": level, "rollout_is_threshold": 1e9 if high is None else high}
    return options | ({"rollout_is_lower": low or 0.0} if kind == "mask" else {})


def dpo_algorithm(args: Any) -> BaseAlgorithm:
    """Raises ConfigError for several losses at once."""
    losses = [args.loss_type] if isinstance(args.loss_type, str) else list(args.loss_type)
    if len(losses) != 1:
        raise ConfigError(f"loss_type={losses}: one loss is trained, name one")
    (name,) = losses
    if name != "discopop":
        _refuse_unread(args, f"loss_type='{name}'", "discopop_tau")
    if name in (*_OTHERS, "discopop"):
        _refuse_unread(args, f"loss_type='{name}'", "label_smoothing", *(["beta"] if name == "sft" else []))
    if name in _OTHERS:
        return make_algorithm(name, **({} if name == "sft" else {"beta": args.beta}))
    if name not in _PAIRS:
        known = nearest(name, [*_PAIRS, *_OTHERS])
        hint = "it is not here: loss_type='aot' sorts whole pairs" if name == "aot_unpaired" else known
        raise ConfigError(f"loss_type='{name}': {hint}")
    if name == "sigmoid" and args.label_smoothing:
        raise ConfigError("label_smoothing is not of loss_type='sigmoid': set loss_type='robust'")
    options = {"discopop_tau": args.discopop_tau} if name == "discopop" else {"label_smoothing": args.label_smoothing}
    return make_algorithm("dpo", beta=args.beta, loss_type=_PAIRS[name], **options)


def kto_algorithm(args: Any) -> BaseAlgorithm:
    names = ("beta", "desirable_weight", "undesirable_weight", "loss_type")
    options = {name: getattr(args, name) for name in names}
    if args.loss_type == "kto":
        options["kl_rows"] = args.per_device_train_batch_size * torchrun_ranks()
    return make_algorithm("kto", **options)


def _refuse_unread(args: Any, beside: str, *names: str) -> None:
    """Raises ConfigError for an argument that is set, and that nothing reads because of another one."""
    for name in names:
        if (value := getattr(args, name)) != args.defaults()[name]:
            raise ConfigError(f"{name}={value!r} is not read with {beside}: leave it out")
