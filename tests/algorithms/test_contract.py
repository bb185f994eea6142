"""Registry, options, and what a wrong algorithm is told."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from typing import Any, ClassVar

import pytest
import torch

from tests.algorithms.support import OFFLINE, ONLINE, experience, loss_input, unprepared
from tests.package import modules
from verl.algorithms import (
    BaseAlgorithm,
    Loss,
    LossInput,
    algorithm_names,
    default_algorithm,
    make_algorithm,
    register_algorithm,
    registry,
)
from verl.algorithms.baselines import GRPO
from verl.errors import ConfigError, DataError


class Mine(BaseAlgorithm):
    """A user's algorithm: the loss alone, and one option."""

    scale: float = 1.0

    def compute_loss(self, x: LossInput) -> Loss:
        assert x.log_probs is not None
        return Loss(total=-self.scale * (x.weights * x.columns["advantages"] * x.log_probs).sum())


@pytest.mark.parametrize("name", [*ONLINE, *OFFLINE])
def test_prepare_overwrites_no_column(name: str) -> None:
    algorithm, batch = unprepared(name, 3)
    assert algorithm.prepare(batch)[0].changed(batch) == []


def test_names_are_sorted() -> None:
    assert algorithm_names() == sorted(algorithm_names())


@pytest.mark.slow
def test_the_registry_knows_where_each_algorithm_of_the_package_is() -> None:
    """Before any of their modules is imported, in which a decorator has the name, too."""
    decorated = {
        (name.value, f"verl.{place.removesuffix('.py').replace('/', '.')}.{node.name}")
        for place, (_, tree) in modules().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for call in node.decorator_list
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "register_algorithm"
        for name in call.args
        if isinstance(name, ast.Constant)
    }
    script = (
        "import sys; from verl.algorithms import make_algorithm, registry; known = {*registry._ALGORITHMS.items()};"
        "make_algorithm('grpo'); assert 'verl.algorithms.pairs' not in sys.modules; print(sorted(known))"
    )
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert shown.stdout.strip() == str(sorted(decorated))


@pytest.mark.parametrize("name", [*ONLINE, *OFFLINE])
def test_every_algorithm_by_name(name: str) -> None:
    algorithm = make_algorithm(name)
    assert algorithm.name == name
    assert "actor" in algorithm.roles
    assert algorithm.__doc__
    again = make_algorithm(name)
    again.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
    assert again.state_dict() == algorithm.state_dict()
    assert pickle.loads(pickle.dumps(algorithm)).loss_columns == algorithm.loss_columns


def test_a_class_with_a_loss_is_enough() -> None:
    algorithm = make_algorithm(Mine, scale=2)
    assert algorithm.scale == 2.0  # type: ignore[attr-defined]
    batch, metrics = algorithm.prepare(experience([2, 3, 1], ["a", "a", "b"], [1.0, 0.0, None]))
    assert metrics == {"abstained": 1.0}
    assert batch.tensor("advantages").tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]
    leaf = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    loss = algorithm.compute_loss(loss_input(algorithm, batch, log_probs=leaf))
    gradient = torch.autograd.grad(loss.total, leaf)[0]
    assert torch.equal(gradient, -2 * algorithm.token_weights(batch) * batch.tensor("advantages"))


def test_an_instance_stays_as_it_is() -> None:
    algorithm = Mine(scale=3.0)
    assert make_algorithm(algorithm) is algorithm
    with pytest.raises(ConfigError, match="finished Mine"):
        make_algorithm(algorithm, scale=1.0)


UNREAD: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"kl_coef": 5.0}), ("grpo", {"kl_target": 0.01}), ("ppo", {"kl_target": 0.2, "kl_in": "none"}),
    ("grpo", {"kl_estimator": "k2"}), ("grpo", {"kl_horizon": 5, "kl_in": "loss"}),
    *((name, {"clip_ratio": 0.01}) for name in ("gspo", "cispo", "gmpo", "gpg", "sapo", "vespo")),
    ("grpo", {"clip_ratio": 0.01, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3}), ("gpg", {"clip_ratio_high": 0.3}),
    *((name, {"clip_ratio_c": 1.5}) for name in ("gspo", "cispo", "gmpo", "gpg", "sapo", "vespo")),
    *((name, {"loss_agg_mode": "token-sum"}) for name in OFFLINE if name != "sft"),
    ("grpo", {"loss_scale_factor": 7.0}), ("sft", {"loss_scale_factor": 7.0}), ("dpo", {"loss_scale_factor": 7.0}),
    ("grpo", {"rollout_is_threshold": 3.0, "rollout_is": None}), ("grpo", {"rollout_rs_threshold": 3.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), UNREAD)
def test_an_option_that_is_not_read_is_refused(name: str, options: dict[str, Any]) -> None:
    option = next(iter(options))
    with pytest.raises(ConfigError, match=f"'{name}' does not read the option '{option}'"):
        make_algorithm(name, **options)


def test_an_option_that_is_read_is_not_refused() -> None:
    for name, option, value in (
        ("dapo", "clip_ratio", 0.1), ("dr_grpo", "loss_scale_factor", 7.0), ("grpo", "clip_ratio_c", None),
        ("gspo", "clip_ratio_c", None), ("grpo", "kl_coef", 0.01), ("dpo", "loss_agg_mode", "token-mean"),
    ):  # fmt: skip
        make_algorithm(name, **{option: value})
    assert make_algorithm("dapo", clip_ratio=0.1).clip_bounds == (0.1, 0.28)  # type: ignore[attr-defined]
    assert make_algorithm("dapo").clip_bounds == (0.2, 0.28)  # type: ignore[attr-defined]
    assert make_algorithm("gspo", clip_ratio_low=None, clip_ratio=0.1).clip_bounds[0] == 0.1  # type: ignore[attr-defined]


def test_wrong_names_options_and_values() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'rloo'\?"):
        make_algorithm("rlo")
    with pytest.raises(ConfigError, match="'grpo' has no option 'clip_ration': did you mean 'clip_ratio'"):
        make_algorithm("grpo", clip_ration=0.1)
    with pytest.raises(ConfigError, match=r"grpo\.clip_ratio: must be a number, not 'wide'"):
        make_algorithm("grpo", clip_ratio="wide")
    with pytest.raises(ConfigError, match=r"grpo\.loss_agg_mode: must be one of token-mean, "):
        make_algorithm("grpo", loss_agg_mode="mean")
    with pytest.raises(ConfigError, match=r"ppo\.kl_estimator: must be one of k1, .*, not .k9."):
        make_algorithm("ppo", kl_estimator="k9")
    with pytest.raises(ConfigError, match=r"clip_ratio_c: must be more than 1.*, not 0.5"):
        make_algorithm("ppo", clip_ratio_c=0.5)
    for name, option, value in (
        ("dpo", "beta", 0.0), ("kto", "beta", -1.0), ("dpo", "label_smoothing", 0.5), ("ppo", "gamma", 1.5),
        ("gpg", "f_norm", 0), ("grpo", "clip_ratio", -0.1), ("safe_rlhf", "lambda_window", 0),
        ("grpo", "rollout_is_threshold", float("nan")),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"^{name}\.{option}: must be .*, not {value}"):
            make_algorithm(name, **{option: value})
    with pytest.raises(ConfigError, match="'seq_mean_k3' has an upper bound only"):
        make_algorithm("grpo", rollout_rs="seq_mean_k3", rollout_rs_lower=0.5)
    with pytest.raises(ConfigError, match="lambda_min <= lambda_init"):
        make_algorithm("safe_rlhf", lambda_init=1e4)
    with pytest.raises(ConfigError, match="overlong_buffer"):
        make_algorithm("dapo", overlong_length=100)


def test_a_wrong_class_is_told_what_is_wrong() -> None:
    class NoLoss(BaseAlgorithm):
        pass

    class BadRole(Mine):
        roles = frozenset({"actor", "critc"})

    class NoActor(Mine):
        roles = frozenset({"reward"})

    class BadHead(Mine):
        head: ClassVar[str] = "rm"

    with pytest.raises(ConfigError, match=r"NoLoss must implement compute_loss\(\)"):
        register_algorithm("no_loss")(NoLoss)
    with pytest.raises(ConfigError, match="NoLoss"):
        make_algorithm(NoLoss)
    with pytest.raises(ConfigError, match="unknown role 'critc': did you mean 'critic'"):
        make_algorithm(BadRole)
    with pytest.raises(ConfigError, match="roles must name 'actor'"):
        make_algorithm(NoActor)
    with pytest.raises(ConfigError, match="head must be"):
        make_algorithm(BadHead)
    with pytest.raises(ConfigError, match="subclass of"):
        make_algorithm(dict)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'grpo' is taken by verl\.algorithms\.baselines\.GRPO"):
        register_algorithm("grpo")(Mine)


def test_registering_twice_from_one_place_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))

    def define(base: type[BaseAlgorithm]) -> type[BaseAlgorithm]:
        class Again(base):  # type: ignore[misc, valid-type]
            pass

        return register_algorithm("again_and_again")(Again)

    define(GRPO)
    second = define(GRPO)
    assert type(make_algorithm("again_and_again")) is second


def test_objectives_of_trained_roles() -> None:
    ppo = make_algorithm("ppo", entropy_coeff=0.1)
    assert ppo.objective("critic").loss_needs.columns == ("values", "returns")
    assert ppo.objective("actor").loss_needs.entropy
    assert not ppo.objective("critic").loss_needs.entropy
    with pytest.raises(ConfigError, match="does not train a 'reward'"):
        ppo.objective("reward")
    with pytest.raises(ConfigError, match="does not train a 'critic'"):
        make_algorithm("grpo").objective("critic")
    safe = make_algorithm("safe_rlhf", baseline="critics")
    assert safe.objective("cost_critic").loss_needs.columns == ("cost_values", "cost_returns")


def test_roles_follow_options() -> None:
    assert make_algorithm("grpo").roles == {"actor", "reward"}
    assert make_algorithm("grpo", kl_in="loss").roles == {"actor", "reward", "reference"}
    assert make_algorithm("ppo", kl_in="none").roles == {"actor", "reward", "critic"}
    assert make_algorithm("safe_rlhf").roles == {"actor", "reward", "cost"}
    assert "cost_critic" in make_algorithm("safe_rlhf", baseline="critics").roles
    assert make_algorithm("simpo").roles == {"actor"}
    assert not make_algorithm("gpg", rollout_is=None).needs_old_log_probs
    assert make_algorithm("gpg").needs_old_log_probs  # to correct for samples of an older policy
    assert make_algorithm("grpo").needs_old_log_probs


def test_the_default_depends_on_what_the_batch_has() -> None:
    batch = experience([1, 2, 1], ["a", "a", "b"], [1.0, 0.0, 1.0])
    assert default_algorithm(batch).name == "ppo"
    assert default_algorithm(batch.drop(["values"])).name == "reinforce_plus_plus"
    assert default_algorithm(batch.drop(["values"]).slice(0, 2)).name == "grpo"
    assert "reference" not in default_algorithm(batch).roles


def test_a_missing_column_is_named() -> None:
    batch = experience([1, 2], ["a", "a"], [1.0, 0.0])
    with pytest.raises(DataError, match="no column 'values'"):
        make_algorithm("ppo", kl_in="none").prepare(batch.drop(["values", "cost_values"]))
    with pytest.raises(DataError, match="no column 'reward'"):
        make_algorithm("grpo").prepare(batch.drop(["reward"]))
    short = batch.drop(["values"]).add({"values": [[1.0], [1.0]]})
    with pytest.raises(DataError, match="row 1 has 1 values for 2 tokens"):
        make_algorithm("ppo", kl_in="none").prepare(short)
    with pytest.raises(DataError, match="head"):
        make_algorithm("dpo").compute_loss(loss_input(make_algorithm("grpo"), batch))
