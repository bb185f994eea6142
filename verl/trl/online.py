"""TRL's trainers on sampled completions, by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from verl.data.loader import PromptLoader
from verl.data.prefetch import Prefetch
from verl.data.prompts import PromptDataset, load_prompts, stream_prompts
from verl.data.tokenize import tokenize_prompts
from verl.errors import ConfigError
from verl.rewards.signatures import OF_TRL
from verl.roles.reward import Reward
from verl.rollout.environments import EnvironmentEpisode
from verl.trl.arguments import GRPOConfig, OnlineConfig, RLOOConfig
from verl.trl.losses import grpo_algorithm, rloo_algorithm
from verl.trl.trainers import BaseTrainer

#: The prompt of a row that leaves it to its environment.
_EMPTY = [{"role": "user", "content": ""}]


class GRPOTrainer(BaseTrainer):
    """TRL's `GRPOTrainer`: samples a group of completions to each prompt, and learns which of them are better.

    Args:
        model: a model, or the name or directory of one.
        reward_funcs: a function `f(prompts, completions, **columns)`, a reward model or its name, or a list of these,
            which `args.reward_weights` weighs. One that returns None for a completion is left out of its sum.
        args: `GRPOConfig`, or `transformers.TrainingArguments`.
        train_dataset, eval_dataset: rows with a column `prompt`, a text or messages; the other columns go to the
            rewards.
        processing_class: the tokenizer; None: the model's own.
        reward_processing_classes: the tokenizer of a reward model, or a list with one for each of `reward_funcs` (None
            for a function); None: the models' own.
        callbacks: `transformers.TrainerCallback`s.
        optimizers: (optimizer, scheduler) of torch; (None, None): AdamW, as the arguments say.
        peft_config: `peft.LoraConfig`.
        tools: functions, plain or async, with annotations and a docstring, that the model may call.
        environment_factory: a class (or a function without arguments) whose instances have `reset(**row)`, whose public
            methods are tools too, and whose `get_reward()`, if there is one, is a reward of weight 1; or a mapping of
            names to these, which rows choose from by their column `environment`. Then `reward_funcs` may be left out,
            and `train_dataset`, too, where `max_steps` says how long to train.
        **more: these keywords; `placement`, `strategy` and `rollout` of this package.
    """

    config: ClassVar[type[OnlineConfig]] = GRPOConfig
    algorithm = staticmethod(grpo_algorithm)
    tag = "grpo"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        reward_processing_classes: Any = None,
        tools: Sequence[Any] | None = None,
        environment_factory: Any = None,
        **more: Any,
    ) -> None:
        config = self.config.of(args)
        self.updates = config.rollout_samples() // config.samples() * config.num_iterations
        functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        self.reward_funcs = [one for one in functions if one is not None]
        self.reward_func_names = [
            getattr(one, "__name__", None)
            or str(getattr(getattr(one, "config", None), "_name_or_path", one)).split("/")[-1]
            for one in self.reward_funcs
        ]
        self.reward_processing_classes = _of_each(reward_processing_classes, self.reward_funcs)
        if not self.reward_funcs and environment_factory is None:
            raise ConfigError(
                f"No reward source provided: {type(self).__name__} needs reward_funcs=..., or an environment_factory "
                "with get_reward()"
            )
        self._episode = None
        if environment_factory is not None or tools:
            most = getattr(config, "max_tool_calling_iterations", None)
            turns = None if most is None else most + 1
            self._episode = EnvironmentEpisode(environment_factory, tools or (), max_turns=turns)
        if train_dataset is None and environment_factory is not None:
            if isinstance(environment_factory, Mapping) or config.max_steps <= 0:
                raise ConfigError("without train_dataset, give one environment_factory, and say max_steps=...")
            train_dataset = [{"prompt": _EMPTY}] * config.prompts()
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **more,
        )
        weights = self.args.reward_weights or [1.0] * len(self.reward_funcs)
        self.reward_weights = torch.tensor(weights, dtype=torch.float32)

    def _source(self) -> Reward | None:
        if not self.reward_funcs:
            return None
        parts = [
            self._with_extras(function) if tokenizer is None else {"source": function, "tokenizer": tokenizer}
            for function, tokenizer in zip(self.reward_funcs, self.reward_processing_classes, strict=True)
        ]
        # TRL's rule: a sum over the rewards that have a number for the completion.
        return Reward(parts, weights=self.args.reward_weights, partial=True)

    def _data(self) -> tuple[Any, float]:
        args, count = self.args, self.args.prompts()
        has_length = hasattr(self.train_dataset, "__len__")
        data: Any
        if has_length:
            data = self._prompts(self.train_dataset)
        else:
            data = stream_prompts(self.train_dataset, chat_template_kwargs=args.mapping("chat_template_kwargs"))
            args.read_here()
        if args.max_prompt_length is not None:
            data, _ = tokenize_prompts(
                data, self.actor.tokenizer, max_prompt_length=args.max_prompt_length, truncation="left"
            )
        # What is left over at the end of an epoch begins the next one.
        loader = PromptLoader(data, count, seed=args.seed, shuffle=args.shuffle_dataset if has_length else None)
        return Prefetch(loader), len(data) / count if has_length else math.inf

    def _prompts(self, rows: Any) -> PromptDataset:
        rows = rows if hasattr(rows, "__len__") else list(rows)
        if self._episode is not None and len(rows) and "prompt" not in rows[0]:
            rows = [{**row, "prompt": _EMPTY} for row in rows]
        return load_prompts(rows, chat_template_kwargs=self.args.mapping("chat_template_kwargs"))

    def _evaluate(self, rows: Any) -> Mapping[str, Any]:
        args = self.args
        n = args.num_generations_eval or args.num_generations
        evaluation = self.trainer.evaluate(self._prompts(rows).batch, n=n, temperature=args.temperature)
        if all(reward is None for reward in evaluation.rows["reward"]):  # there is no loss
            return evaluation.metrics
        metrics = self.trainer.evaluate_loss(evaluation.samples)
        return {**evaluation.metrics, **metrics, "loss/actor": metrics["loss"]}

    def _training(self) -> dict[str, Any]:
        args, samples = self.args, self.args.samples()
        return {
            "mini_batch_size": None if samples == args.rollout_samples() else samples,
            "epochs": args.num_iterations,
            "episode": self._episode,
            "sampling": {
                "max_new_tokens": args.max_completion_length,
                "temperature": args.temperature,
                "top_p": args.top_p,
                "top_k": args.top_k or 0,
                "min_p": args.min_p or 0.0,
            },
        }

    def _with_extras(self, source: Any) -> Any:
        """A reward function that gets what it takes of `trainer_state`, `log_metric` and `log_extra` (whose columns
        nobody shows here), and, as there, all completions of a step at once."""
        if not callable(source) or hasattr(source, "forward"):
            return source
        try:
            parameters = inspect.signature(source).parameters
        except (TypeError, ValueError):  # compiled code may have no signature
            return source
        if OF_TRL.isdisjoint(parameters):
            return source
        extras = {"trainer_state": self.state, "log_metric": self.log_metric, "log_extra": lambda column, values: None}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        taken = {name: value for name, value in extras.items() if takes_all or name in parameters}
        bound = partial(source, **taken)
        bound.whole_batch, bound.process = True, not taken  # type: ignore[attr-defined]  # a process would see an old state
        return bound


class RLOOTrainer(GRPOTrainer):
    """TRL's `RLOOTrainer`: as `GRPOTrainer`, with the mean reward of a prompt's other completions as baseline; `args`
    is an `RLOOConfig`."""

    config = RLOOConfig
    algorithm = staticmethod(rloo_algorithm)
    tag = "rloo"

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *more: Any, **others: Any) -> None:
        for name in ("tools", "environment_factory"):
            if others.get(name) is not None:
                raise ConfigError(f"RLOOTrainer has no argument '{name}': GRPOTrainer has it")
        super().__init__(model, reward_funcs, args, *more, **others)


def _of_each(tokenizers: Any, rewards: Sequence[Any]) -> list[Any]:
    """A tokenizer for each reward.

    Raises:
        ConfigError: there are more or fewer of them.
    """
    if tokenizers is None:
        return [None] * len(rewards)
    listed = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    if len(listed) != len(rewards):
        raise ConfigError(
            f"reward_processing_classes ({len(listed)}) must match reward_funcs ({len(rewards)}): give one "
            "for each, None for a function"
        )
    return listed
