"""Estimates of the KL divergence between two policies from the log-probs of sampled tokens, and its controller.

Estimators: Schulman, "Approximating KL divergence" (2020), with d = log p - log q for tokens drawn from p:
k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d; abs = |d|. Other systems' names are accepted: kl (k1), mse (k2),
low_var_kl (k3). A name with a `+` has the value of that estimator and the gradient of k2: of these, k2 alone
has the gradient of the KL divergence as its expectation (straight-through).

Controller: Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv:1909.08593), section 2.2.
Deviation: a batch counts as at most one horizon, so that none changes the coefficient by more than a fifth. In the
paper's form a batch of five horizons can make it 0, from where it never comes back.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from verl._base.autograd import bounded

_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
Estimator = Literal[
    "k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl", "k1+", "k2+", "k3+", "abs+", "kl+", "mse+", "low_var_kl+"
]

# Against overflow, a bound of what is exponentiated. The gradient stays: the further a token is from the reference, the
# more it needs one.
MAX_LOG_RATIO = 20.0


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str, bound: float = MAX_LOG_RATIO) -> Tensor:
    """KL(policy || reference) at each token, the shape of the inputs; differentiable in `log_probs`.

    Args:
        bound: of the exponent in k3, in nats. Beyond it k3 grows linearly, and its gradient stays that at the bound.
    """
    name, difference = estimator.removesuffix("+"), log_probs - ref_log_probs
    k2, kind = 0.5 * difference.square(), _ALIASES.get(name, name)
    if kind == "k3":
        value = bounded(-difference, -bound, bound).exp() - 1 + difference
    else:
        value = {"k1": difference, "k2": k2, "abs": difference.abs()}[kind]
    return k2 - k2.detach() + value.detach() if estimator.endswith("+") else value


def kl_of_token(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """KL(policy || reference) of what comes next being a token or any other, given the token's log-probs; their shape.

    Whatever the token, it is at most the KL over the whole vocabulary (data processing), and near it where the policy
    has little besides the token.
    """
    # Less beside a token is the rounding of its log-prob in fp32.
    policy, reference = ((-log_p.expm1()).clamp(min=2.0**-23) for log_p in (log_probs, ref_log_probs))
    return log_probs.exp() * (log_probs - ref_log_probs) + policy * (policy / reference).log()


def adapted(coefficient: float, kl: float, samples: int, target: float, horizon: int) -> float:
    """The KL coefficient after `samples` with this mean KL, so that the KL stays near a target.

    Args:
        kl: in nats a token; one that is not finite changes nothing.
        horizon: samples over which an error of 20 % or more changes the coefficient by about 20 %.
    """
    if not math.isfinite(kl):
        return coefficient
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * min(samples / horizon, 1.0))
