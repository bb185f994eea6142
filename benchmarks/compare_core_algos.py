"""Compare every estimator, KL, aggregation and loss with verl's `core_algos` and the preference losses with TRL's.

    python benchmarks/compare_core_algos.py --verl DIR [--trl DIR] [--site DIR ...] [--cases 20]

DIR is a directory that holds the unpacked package (verl 0.9.1, trl 1.16.0); `--site` adds directories with what they
import. Both packages named `verl` are loaded into this one process, the reference first. Inputs are random and ragged
(groups of one to five, masked tokens inside responses, rows without a token and rows of masked tokens alone), in fp64;
what is printed is the largest absolute difference of values and, for losses, of gradients over all cases. Exit status
1 if any is above 1e-5. The last lines name what the reference registers and this project does not have.

TRL's losses live inside trainers; their own `_compute_loss` runs here on log-probs that stand for a model's.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

TOLERANCE = 1e-5
#: What of the reference's registries is compared here.
ESTIMATORS = {
    "gae", "grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "opo", "remax", "gpg",
    "grpo_vectorized", "rloo_vectorized",
}  # fmt: skip
LOSSES = {"vanilla", "gspo", "cispo", "geo_mean", "gpg"}
ROOT = Path(__file__).resolve().parent.parent


def load_reference(directory: str, sites: list[str]) -> SimpleNamespace:
    """The reference's modules; afterwards `import verl` means this project again."""
    sys.path[:0] = [directory, *sites]
    names = ("trainer.ppo.core_algos", "trainer.ppo.rollout_corr_helper", "workers.config")
    core, correction, config = (importlib.import_module(f"verl.{name}") for name in names)
    for name in [name for name in sys.modules if name == "verl" or name.startswith("verl.")]:
        del sys.modules[name]
    sys.path[:] = [str(ROOT), *(entry for entry in sys.path if entry != directory)]
    return SimpleNamespace(core=core, correction=correction, ActorConfig=config.ActorConfig)


class Case:
    """One random batch, ragged for us and padded for the reference."""

    def __init__(self, seed: int, ours: ModuleType) -> None:
        g = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 6, (4,), generator=g).tolist()
        groups = [f"g{number}" for number, size in enumerate(sizes) for _ in range(size)]
        self.rows = len(groups)
        order = torch.randperm(self.rows, generator=g).tolist()
        self.groups = [groups[i] for i in order]
        self.lengths = torch.randint(0, 12, (self.rows,), generator=g).clamp(min=int(seed % 2 == 0)).tolist()
        self.width = max(self.lengths)
        self.inside = torch.arange(self.width)[None] < torch.tensor(self.lengths)[:, None]
        # The policy wrote the last token of each response; some tokens before it came from a tool.
        written = torch.rand(self.rows, self.width, generator=g) < 0.8
        last = torch.arange(self.width)[None] == torch.tensor(self.lengths)[:, None] - 1
        # In every third case some rows have masked tokens alone; one row has written ones in any case.
        muted = (torch.rand(self.rows, generator=g) < 0.25) & (seed % 3 == 0)
        longest = self.lengths.index(self.width)
        muted[longest] = False
        self.mask = ((written | last) & self.inside & ~muted[:, None]).double()
        # The reference has the reward of a row without tokens at its last, padded place.
        self.last = last.double()
        self.last[torch.tensor(self.lengths) == 0, -1] = 1

        def normal(scale: float = 1.0) -> Tensor:
            return torch.randn(self.rows, self.width, generator=g, dtype=torch.float64) * scale * self.inside

        self.old = -normal().abs() * self.inside
        self.new = self.old + normal(0.3)
        self.ref = self.old + normal(0.3)
        self.engine = self.old + normal(0.4)
        self.values, self.new_values = normal(), normal()
        self.reward = torch.randint(0, 3, (self.rows,), generator=g).double() - 0.5
        self.greedy = {name: float(number) for number, name in enumerate(sorted(set(self.groups)))}
        self.batch = ours.Batch.from_columns(
            {
                "group": self.groups,
                "reward": self.reward,
                "response_tokens": [[1] * n for n in self.lengths],
                "response_mask": (self.flat(self.mask).to(torch.uint8), self.lengths),
                **{
                    name: (self.flat(values), self.lengths)
                    for name, values in (("log_probs", self.old), ("ref_log_probs", self.ref), ("values", self.values))
                },
            }
        )

    def flat(self, padded: Tensor) -> Tensor:
        return padded[self.inside]

    @property
    def token_rewards(self) -> Tensor:
        return self.reward[:, None] * self.last


class Table:
    """The largest difference of each thing compared."""

    def __init__(self) -> None:
        self.worst: dict[str, float] = defaultdict(float)

    def add(self, name: str, ours: Tensor | float, reference: Tensor | float) -> None:
        difference = (torch.as_tensor(ours).detach().double() - torch.as_tensor(reference).detach().double()).abs()
        worst = float(difference.max()) if difference.numel() else 0.0
        self.worst[name] = math.inf if math.isnan(worst) else max(self.worst[name], worst)

    def print(self) -> bool:
        width = max(map(len, self.worst))
        for name, worst in self.worst.items():
            print(f"{name:{width}}  {worst:9.1e}  {'ok' if worst <= TOLERANCE else 'DIFFERS'}")
        print(f"{len(self.worst)} compared, largest difference {max(self.worst.values()):.1e}")
        return max(self.worst.values()) <= TOLERANCE


def loss_input(ours: ModuleType, algorithm: Any, batch: Any, **outputs: Tensor) -> Any:
    """The whole batch as one micro-batch."""
    lengths = batch.lengths("response_tokens")
    number = {name: i for i, name in enumerate(dict.fromkeys(batch["group"]))}
    columns = {n: batch.tensor(n) for n in algorithm.loss_columns if n in batch and n != "group"}
    columns["group"] = torch.tensor([number[name] for name in batch["group"]])
    mask = batch.tensor("response_mask") != 0
    return ours.algorithms.LossInput(
        **outputs,
        weights=(weights := algorithm.token_weights(batch)),
        mask=mask,
        sequence=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        num_sequences=len(lengths),
        total_sequences=len(lengths),
        total_tokens=int(mask.sum()),
        total_active=int(weights.count_nonzero()),
        total_groups=len(number),
        columns=columns,
    )


def compare_advantages(case: Case, table: Table, ref: SimpleNamespace, ours: ModuleType) -> None:
    core, mask, rewards = ref.core, case.mask, case.token_rewards
    index = case.groups
    baselines = torch.tensor([case.greedy[name] for name in index], dtype=torch.float64)
    options = {"response_mask": mask, "index": index}
    config = {"norm_adv_by_std_in_grpo": True}
    expected: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
        "grpo": ("grpo", {}, lambda r: core.compute_grpo_outcome_advantage(r, **options)),
        "grpo, no std": (
            "dr_grpo",
            {},
            lambda r: core.compute_grpo_outcome_advantage(r, **options, norm_adv_by_std_in_grpo=False),
        ),
        "rloo": ("rloo", {}, lambda r: core.compute_rloo_outcome_advantage(r, **options)),
        "opo": ("opo", {}, lambda r: core.compute_opo_outcome_advantage(r, **options)),
        "gpg": ("gpg", {}, lambda r: core.compute_gpg_outcome_advantage(r, **options)),
        "reinforce++": (
            "reinforce_plus_plus",
            {"gamma": 0.9},
            lambda r: core.compute_reinforce_plus_plus_outcome_advantage(r, mask, SimpleNamespace(gamma=0.9)),
        ),
        "reinforce++ baseline": (
            "reinforce_plus_plus_baseline",
            {},
            lambda r: core.compute_reinforce_plus_plus_baseline_outcome_advantage(r, **options),
        ),
        "ppo (gae)": (
            "ppo",
            {"gamma": 0.95, "lam": 0.9, "kl_target": None},
            lambda r: core.compute_gae_advantage_return(r, case.values, mask, 0.95, 0.9),
        ),
        "remax": ("remax", {}, lambda r: core.compute_remax_outcome_advantage(r, baselines, mask)),
    }
    for label, (name, settings, reference) in expected.items():
        for kl_in, kl in (("none", {}), ("reward", {"kl_coef": 0.05})):
            algorithm = ours.algorithms.make_algorithm(name, **{**settings, "kl_in": kl_in, **kl})
            batch = case.batch
            if algorithm.greedy_baseline:
                batch = with_greedy(case, ours)
            prepared, _ = algorithm.prepare(batch)
            shaped = rewards
            if kl_in == "reward":
                shaped = rewards - 0.05 * core.kl_penalty(case.old, case.ref, "kl") * mask
            advantages, returns = reference(shaped.clone())
            suffix = ", KL in reward" if kl_in == "reward" else ""
            written = torch.where(mask > 0, advantages, 0.0)  # a mean over no token is NaN there
            table.add(f"advantage: {label}{suffix}", prepared.tensor("advantages"), case.flat(written))
            if name == "ppo":
                table.add(f"returns: {label}{suffix}", prepared.tensor("returns"), case.flat(returns))
    # Groups of one: an error there in pass@k, 0 or rounding in the vectorised forms.
    several = [case.groups.count(name) > 1 for name in index]
    if any(several):
        keep = torch.tensor(several)
        chosen = np.array([name for name, kept in zip(index, several, strict=True) if kept])
        for name, vectorised in (
            ("grpo", core.compute_grpo_vectorized_outcome_advantage),
            ("rloo", core.compute_rloo_vectorized_outcome_advantage),
        ):
            advantages, _ = vectorised(rewards[keep], mask[keep], chosen)
            prepared, _ = ours.algorithms.make_algorithm(name).prepare(case.batch.filter(several))
            table.add(f"advantage: {name}, vectorised", prepared.tensor("advantages"), advantages[case.inside[keep]])
        advantages, _ = core.compute_grpo_passk_outcome_advantage(rewards[keep], mask[keep], chosen, config=config)
        prepared, _ = ours.algorithms.make_algorithm("grpo_passk").prepare(case.batch.filter(several))
        table.add("advantage: grpo_passk", prepared.tensor("advantages"), advantages[case.inside[keep]])


def with_greedy(case: Case, ours: ModuleType) -> Any:
    """The batch with one greedy sample a group, whose rewards are `case.greedy`."""
    greedy = ours.Batch.from_columns(
        {
            "group": list(case.greedy),
            "reward": list(case.greedy.values()),
            "response_tokens": [[1]] * len(case.greedy),
            "response_mask": [[1]] * len(case.greedy),
            "baseline": [True] * len(case.greedy),
            **{name: [[0.0]] * len(case.greedy) for name in ("log_probs", "ref_log_probs", "values")},
        }
    )
    return ours.Batch.concat([case.batch.add({"baseline": [False] * case.rows}), greedy])


def compare_aggregation(case: Case, table: Table, ref: SimpleNamespace, ours: ModuleType) -> None:
    aggregation = importlib.import_module("verl.algorithms.losses")
    sequence = torch.arange(case.rows).repeat_interleave(torch.tensor(case.lengths))
    for mode in aggregation.AggregationMode.__args__:
        # At least one row without a counted token: it is no sequence.
        mask = case.mask.clone()
        mask[case.lengths.index(min(case.lengths))] = 0
        for factor in (None, 7.0) if mode.endswith("norm") else (None,):
            weights = aggregation.aggregation_weights(case.flat(mask) != 0, sequence, case.rows, mode, factor)
            expected = ref.core.agg_loss(case.values, mask, mode, loss_scale_factor=factor)
            suffix = ", factor" if factor else ""
            table.add(f"aggregation: {mode}{suffix}", (weights * case.flat(case.values)).sum(), expected)


def compare_kl(case: Case, table: Table, ref: SimpleNamespace, ours: ModuleType) -> None:
    kl = importlib.import_module("verl.algorithms.kl")
    for name in [*kl.KL_ESTIMATORS, *(f"{n}+" for n in kl.KL_ESTIMATORS)]:
        mine, theirs = (case.new.clone().requires_grad_() for _ in range(2))
        far = case.ref - 30 * case.last  # beyond the overflow bounds, too
        ours_kl, ref_kl = kl.kl_estimate(mine, far, name), ref.core.kl_penalty(theirs, far, name)
        table.add(f"KL: {name}", ours_kl, ref_kl)
        ours_kl.sum().backward()
        ref_kl.sum().backward()
        table.add(f"KL: {name}, gradient", mine.grad, theirs.grad)
    coefficient = 0.01
    reference = ref.core.AdaptiveKLController(0.01, 0.1, 100)
    for step in range(20):
        measured = float(case.values[0, 0].abs()) * step / 10
        coefficient = kl.adapted(coefficient, measured, case.rows, 0.1, 100)
        reference.update(measured, case.rows)
    table.add("KL: adaptive controller", coefficient, float(reference.value))


def compare_policy_losses(case: Case, table: Table, ref: SimpleNamespace, ours: ModuleType) -> None:
    bounds = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
    settings: dict[str, tuple[str, dict[str, Any], str]] = {
        "ppo clip": ("grpo", {"clip_ratio": 0.15}, "vanilla"),
        "ppo clip, low and high": ("grpo", bounds, "vanilla"),
        "ppo clip, dual": ("grpo", {**bounds, "clip_ratio_c": 1.2}, "vanilla"),
        "gspo": ("gspo", {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}, "gspo"),
        "cispo": ("cispo", bounds, "cispo"),
        "gmpo": ("gmpo", bounds, "geo_mean"),
        "gpg": ("gpg", {}, "gpg"),
        "ppo clip, KL in loss, entropy": ("grpo", {"kl_in": "loss", "kl_coef": 0.05, "entropy_coeff": 0.02}, "vanilla"),
    }
    # The reference's mean over rows has those without a counted token, too.
    gmpo_scale = case.rows / float((case.mask.sum(1) > 0).sum())
    engine = case.batch.add({"rollout_log_probs": (case.flat(case.engine), case.lengths)})
    for label, (name, options, loss_name) in settings.items():
        for corrected in (False, True):
            for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"):
                if name == "gmpo" and mode != "seq-mean-token-mean":
                    continue
                algorithm = ours.algorithms.make_algorithm(name, loss_agg_mode=mode, **options)
                prepared, _ = algorithm.prepare(engine if corrected else case.batch)
                mine = case.flat(case.new).clone().requires_grad_()
                entropy = case.flat(case.values).abs()
                outputs = {"log_probs": mine, "entropy": entropy}
                loss = algorithm.compute_loss(loss_input(ours, algorithm, prepared, **outputs)).total
                loss.backward()

                theirs = case.new.clone().requires_grad_()
                advantages = torch.zeros_like(case.new)
                advantages[case.inside] = prepared.tensor("advantages")
                weights = None
                if corrected:
                    difference = case.old - case.engine
                    weights, _ = ref.correction.compute_rollout_correction_weights(difference, case.mask, "token", 2.0)
                expected, _ = ref.core.get_policy_loss_fn(loss_name)(
                    old_log_prob=case.old,
                    log_prob=theirs,
                    advantages=advantages,
                    response_mask=case.mask,
                    loss_agg_mode=mode,
                    config=actor_config(ref, algorithm),
                    rollout_is_weights=weights,
                )
                if name == "gmpo":
                    expected = expected * gmpo_scale
                if algorithm.kl_in == "loss":
                    kl = ref.core.kl_penalty(theirs, case.ref, "low_var_kl")
                    expected = expected + 0.05 * ref.core.agg_loss(kl, case.mask, mode)
                    expected = expected - 0.02 * ref.core.agg_loss(case.values.abs(), case.mask, mode)
                expected.backward()
                suffix = ", importance weights" if corrected else ""
                table.add(f"loss: {label}{suffix}", loss.detach(), expected.detach())
                table.add(f"loss: {label}{suffix}, gradient", mine.grad, case.flat(theirs.grad))


def actor_config(ref: SimpleNamespace, algorithm: Any) -> Any:
    low, high = algorithm.clip_bounds
    return ref.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=algorithm.clip_ratio,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=algorithm.clip_ratio_c,
    )


def compare_value_loss(case: Case, table: Table, ref: SimpleNamespace, ours: ModuleType) -> None:
    for clip in (0.2, 0.5):
        algorithm = ours.algorithms.make_algorithm("ppo", kl_in="none", cliprange_value=clip)
        prepared, _ = algorithm.prepare(case.batch)
        mine, theirs = case.flat(case.new_values).requires_grad_(), case.new_values.clone().requires_grad_()
        objective = algorithm.objective("critic")
        loss = objective.compute_loss(loss_input(ours, objective, prepared, values=mine)).total
        returns = torch.zeros_like(case.new)
        returns[case.inside] = prepared.tensor("returns")
        expected, _ = ref.core.compute_value_loss(theirs, returns, case.values, case.mask, clip)
        loss.backward()
        expected.backward()
        table.add("loss: value, clipped", loss.detach(), expected.detach())
        table.add("loss: value, clipped, gradient", mine.grad, case.flat(theirs.grad))


def compare_correction(case: Case, table: Table, ref: SimpleNamespace, ours: ModuleType) -> None:
    correction = importlib.import_module("verl.algorithms.correction")
    responses = importlib.import_module("verl.algorithms.responses").Responses(case.batch)
    ratio = correction.LogRatio.of(responses, case.flat(case.old), case.flat(case.engine))
    padded = case.old - case.engine
    for level in ("token", "sequence"):
        for threshold, spec, lower in ((2.0, 2.0, None), (1.5, "0.5_1.5", 0.5)):
            for normalize in (False, True):
                weights = correction.importance_weights(ratio, level, threshold, lower, normalize)
                expected, metrics = ref.correction.compute_rollout_correction_weights(
                    padded, case.mask, level, spec, normalize
                )
                kind = "truncated" if lower is None else "masked"
                suffix = ", normalised" if normalize else ""
                table.add(f"correction: {level}, {kind}{suffix}", weights, case.flat(expected))
                if level == "token" and not normalize:
                    ess = correction.mismatch(ratio, weights)["mismatch/ess"]
                    table.add("correction: effective sample size", ess, metrics["rollout_is_eff_sample_size"])
    for rule in correction.Rejection.__args__:
        spec, bounds = ("0.7_1.2", (1.2, 0.7)) if rule.endswith("k1") else (0.05, (0.05, None))
        stay = correction.accepted(ratio, rule, *bounds)
        expected, _ = ref.correction.compute_rollout_rejection_mask(padded, case.mask, rule, spec)
        table.add(f"rejection: {rule}", (stay & (case.flat(case.mask) != 0)).double(), case.flat(expected))
    measured = correction.mismatch(ratio)
    expected = ref.correction.compute_offpolicy_metrics(case.old, case.engine, case.mask)
    table.add("mismatch: kl", measured["mismatch/kl"], expected["kl"])
    table.add("mismatch: k3", measured["mismatch/k3"], expected["k3_kl"])


def compare_trl(seed: int, table: Table, ours: ModuleType) -> None:
    """DPO, IPO, SimPO, ORPO and KTO on six pairs; TRL's own functions on the same log-probs."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer

    g = torch.Generator().manual_seed(seed)
    pairs, width = 6, 9
    lengths = torch.randint(1, width + 1, (2 * pairs,), generator=g)  # chosen rows first, as TRL has them
    inside = torch.arange(width)[None] < lengths[:, None]
    policy = -torch.rand(2 * pairs, width, generator=g, dtype=torch.float64) * 3 * inside - 1e-3 * inside
    reference = policy + 0.5 * torch.randn(2 * pairs, width, generator=g, dtype=torch.float64) * inside
    labels = [1.0] * pairs + [0.0] * pairs
    batch = ours.Batch.from_columns(
        {
            "group": [f"p{row % pairs}" for row in range(2 * pairs)],
            "label": labels,
            "prompt_tokens": [[row] for row in range(2 * pairs)],
            "response_tokens": [[1] * n for n in lengths.tolist()],
            "response_mask": [[1] * n for n in lengths.tolist()],
            "ref_log_probs": (reference[inside], lengths.tolist()),
        }
    )

    def loss_of(name: str, prepared: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
        algorithm = ours.algorithms.make_algorithm(name, **options)
        rows, _ = algorithm.prepare(batch if prepared is None else prepared)
        leaf = policy[inside].clone().requires_grad_()
        loss = algorithm.compute_loss(loss_input(ours, algorithm, rows, log_probs=leaf)).total
        loss.backward()
        return loss.detach(), leaf.grad

    def check(name: str, mine: tuple[Tensor, Tensor], expected: Callable[[Tensor], Tensor]) -> None:
        leaf = policy.clone().requires_grad_()
        value = expected(leaf)
        value.backward()
        table.add(f"TRL: {name}", mine[0], value.detach())
        table.add(f"TRL: {name}, gradient", mine[1], leaf.grad[inside])

    padded_mask = torch.cat([torch.zeros(2 * pairs, 1), inside.double()], 1)  # one prompt token
    inputs = {
        "input_ids": torch.zeros(2 * pairs, width + 1, dtype=torch.int64),
        "attention_mask": torch.cat([torch.ones(2 * pairs, 1), inside.double()], 1),
        "completion_mask": padded_mask,
    }
    ref_sums = reference.sum(1)

    def outputs(log_probs: Tensor) -> SimpleNamespace:
        nothing = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())

    accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_weights=[1.0],
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        calculate_KL=True,
        loss_type="kto",
    )
    dpo_inputs = {**inputs, "ref_chosen_logps": ref_sums[:pairs], "ref_rejected_logps": ref_sums[pairs:]}
    for name, loss_type, options in (
        ("dpo", "sigmoid", {"beta": 0.3}),
        ("dpo", "hinge", {"beta": 0.3, "loss_type": "hinge"}),
        ("dpo", "robust", {"beta": 0.3, "label_smoothing": 0.2}),
        ("ipo", "ipo", {"beta": 0.3}),
    ):
        trainer.loss_types, trainer.beta = [loss_type], options["beta"]
        trainer.label_smoothing = options.get("label_smoothing", 0.0)
        check(
            f"{name} {loss_type}",
            loss_of(name, **options),
            lambda leaf: DPOTrainer._compute_loss(trainer, lambda **_: outputs(leaf), dpo_inputs, False),
        )

    def means(leaf: Tensor) -> tuple[Tensor, Tensor]:
        return ((leaf * inside).sum(1) / lengths).chunk(2)

    def simpo(leaf: Tensor) -> Tensor:
        loss_type = {"loss_type": "simpo", "simpo_gamma": 0.7, "beta": 1.5, "label_smoothing": 0.0, "alpha": 0.0}
        return CPOTrainer.cpo_loss(SimpleNamespace(accelerator=accelerator, **loss_type), *means(leaf))[0].mean()

    def orpo(leaf: Tensor) -> Tensor:
        odds = ORPOTrainer.odds_ratio_loss(SimpleNamespace(accelerator=accelerator, beta=0.2), *means(leaf))[0]
        return -leaf[:pairs][inside[:pairs]].mean() - odds.mean()

    check("simpo", loss_of("simpo", beta=1.5, gamma=0.7), simpo)
    check("orpo", loss_of("orpo", beta=0.2), orpo)

    options = {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.6}
    for sign in (1.0, -1.0):  # a KL above 0, and one that is clamped to it
        kto = ours.algorithms.make_algorithm("kto", **options)
        extended = kto.extend(batch.drop(["ref_log_probs"]))
        wide = extended.lengths("response_tokens")
        flat_ref = torch.randn(sum(wide), generator=g, dtype=torch.float64)
        flat_ref[: int(inside.sum())] = reference[inside]
        flat = flat_ref + 0.2 * sign * torch.rand(sum(wide), generator=g, dtype=torch.float64)
        flat[: int(inside.sum())] = policy[inside]
        extended = extended.add({"log_probs": (flat, wide), "ref_log_probs": (flat_ref, wide)})
        ends = torch.tensor(wide).cumsum(0)[2 * pairs - 1 : -1].tolist()
        kl_sums = [torch.stack([part.sum() for part in x.tensor_split(ends)[1:]]) for x in (flat, flat_ref)]
        trainer.beta, trainer.desirable_weight, trainer.undesirable_weight = options.values()
        trainer._compute_kl_logps = lambda *_, sums=kl_sums: sums[0]
        kto_inputs = {**inputs, "label": torch.tensor(labels) > 0.5, "ref_logps": ref_sums, "ref_KL_logps": kl_sums[1]}
        check(
            "kto" if sign > 0 else "kto, KL clamped",
            loss_of("kto", extended, **options),
            lambda leaf, kto_inputs=kto_inputs: KTOTrainer._compute_loss(
                trainer, lambda **_: outputs(leaf), kto_inputs, False
            ),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", required=True, help="directory that holds the reference's package `verl`")
    parser.add_argument("--trl", help="directory that holds the package `trl`")
    parser.add_argument("--site", action="append", default=[], help="directory with packages that they import")
    parser.add_argument("--cases", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ref = load_reference(args.verl, args.site)
    ours = importlib.import_module("verl")
    importlib.import_module("verl.algorithms")
    table = Table()
    for seed in range(args.cases):
        case = Case(seed, ours)
        for compare in (
            compare_advantages,
            compare_aggregation,
            compare_kl,
            compare_policy_losses,
            compare_value_loss,
            compare_correction,
        ):
            compare(case, table, ref, ours)
    if args.trl:
        sys.path += [args.trl, *args.site]
        for seed in range(args.cases):
            compare_trl(seed, table, ours)
    same = table.print()
    for kind, registry, compared in (
        ("advantage estimators", ref.core.ADV_ESTIMATOR_REGISTRY, ESTIMATORS),
        ("policy losses", ref.core.POLICY_LOSS_REGISTRY, LOSSES),
    ):
        print(f"registered there, not compared: {kind} {', '.join(sorted(map(str, set(registry) - compared)))}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
