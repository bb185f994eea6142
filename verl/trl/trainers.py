"""TRL's trainers by name. Each says its algorithm; all else is one mapping of arguments."""

from __future__ import annotations

import inspect
import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.cluster.controller import Controller
from verl.data.loader import PromptLoader
from verl.data.prefetch import Prefetch
from verl.data.prompts import PromptDataset, load_prompts, stream_prompts
from verl.data.tokenize import tokenize_prompts
from verl.errors import ConfigError, nearest
from verl.models.heads import SCORE_AT_EOS, ValueModel, as_classifier, share_head
from verl.models.lora import has_adapters
from verl.models.options import ModelOptions
from verl.models.source import ModelFiles
from verl.ranks import torchrun_ranks
from verl.report.sinks import open_logger
from verl.rewards.forms import OF_TRL
from verl.roles.actor import Actor
from verl.roles.lora_base import LoraBase
from verl.roles.reward import Reward
from verl.rollout.environments import EnvironmentEpisode
from verl.trainer.evaluation import HeldOut
from verl.training.options import OptimConfig
from verl.trl.arguments import Config, DPOConfig, GRPOConfig, KTOConfig, RewardConfig, SFTConfig
from verl.trl.attributes import Attributes
from verl.trl.data import LabelledLoader, PairLoader, ScoredLoader, TextLoader, TRLLoader
from verl.trl.events import Events, ObservedTrainer
from verl.trl.losses import dpo_algorithm, grpo_algorithm
from verl.trl.optim import optim_settings
from verl.trl.peft import lora_options, with_adapters

logger = logging.getLogger(__name__)

#: The prompt of a row that leaves it to its environment.
_EMPTY = [{"role": "user", "content": ""}]
#: Arguments of this package's that every trainer takes besides TRL's: see `Trainer` and `Actor`.
_OWN = ("placement", "strategy", "rollout")
#: An argument of TRL's -> what to do in its place.
_OTHERWISE = {
    "tokenizer": "it is processing_class",
    "data_collator": "rows are packed, not collated: leave it out",
    "compute_metrics": "use trainer.trainer.add_metric(name, fn)",
    "compute_loss_func": "write an algorithm, see docs/algorithms.md",
    "preprocess_logits_for_metrics": "leave it out",
    "optimizer_cls_and_kwargs": "pass optimizers=(optimizer, None)",
    "formatting_func": "map the data set first, to columns 'prompt' and 'completion', or 'messages'",
    "quantization_config": "train adapters over 4 bits with verl.Actor(model, dtype='int4', lora={...})",
    "reward_processing_classes": "a reward model brings its tokenizer: give verl.Reward(model=...)",
    "reward_model": "it is reward_funcs",
    "max_steps": "it is of args: GRPOConfig(max_steps=...)",
    "rollout_func": "see docs/episodes.md",
}


class _Trainer(Attributes, ABC):
    """What all of them share.

    Attributes:
        actor, trainer, loader: the `Actor`, the `Trainer` and the batches that the arguments have become.
        args: the arguments, as a `Config`.

    Raises:
        ConfigError: an argument is unknown, or is done otherwise here; the message names what to do.
    """

    config: ClassVar[type[Config]]
    algorithm: ClassVar[str]
    head: ClassVar[Literal["lm", "score"]] = "lm"
    #: Rows of a sample: two of a preference.
    rows: ClassVar[int] = 1
    #: Optimizer steps of one step of `trainer`.
    updates = 1

    def __init__(
        self,
        model: Any,
        args: Any = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        **more: Any,
    ) -> None:
        options = self._checked(more)
        if train_dataset is None:
            raise ConfigError(f"{type(self).__name__} needs train_dataset=...")
        self.args: Any = self.config.of(args)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        optimizer, schedule = self._optimizers = optimizers
        self.actor = self._actor(model, processing_class, optimizer, peft_config, options)
        self.processing_class = self.actor.tokenizer
        self.loader, self._per_epoch = self._data(train_dataset)
        self._total = self._steps()
        if optimizer is None:
            settings = optim_settings(self.args, self._total * self.updates)
            self.actor.train_with(**{**settings, "optim": OptimConfig.of(settings["optim"], "args")})
        elif schedule is not None:
            self.actor.train_with(scheduler=schedule)
        self._events = Events(
            args if hasattr(args, "learning_rate") else self.args,
            callbacks or (),
            {"model": self._shown or self.actor.modules, "processing_class": self.processing_class},
            updates=self.updates,
            samples=self.args.samples(),
            epoch_steps=self._per_epoch,
            total=self._total,
        )
        self.trainer = self._trainer(self._source(), options)
        self._events.call("on_init_end")

    @property
    def state(self) -> Any:
        """`transformers.TrainerState`: `global_step`, `epoch`, `log_history`, ..."""
        return self._events.state

    @property
    def model(self) -> Any:
        """The model, with the weights as they are now: with adapters a `peft.PeftModel`, of a reward model a sequence
        classifier, where this process trains it."""
        live = self.actor.present_model()
        shown = self._shown
        return live if shown is None or next(shown.parameters()) is not next(live.parameters()) else shown

    def add_callback(self, callback: Any) -> None:
        self._events.add(callback)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Any:
        """Train to the end; `transformers.trainer_utils.TrainOutput`.

        Args:
            resume_from_checkpoint: True: from the newest checkpoint in `output_dir`; or the path of one.
        """
        from transformers.trainer_utils import TrainOutput

        if resume_from_checkpoint is True:
            self.trainer.resume()
        elif resume_from_checkpoint:
            self.trainer.load_checkpoint(resume_from_checkpoint)
        self._events.begin(self.trainer.steps)
        if self.trainer.steps < self._total:
            self.trainer.fit(self.loader, self._total - self.trainer.steps)
        self._events.end(self.trainer)
        metrics = self._events.summary() | {"epoch": self.state.epoch}
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Measure held-out data; the metrics, whose names begin with `eval_`, of several by name with `eval_NAME_`.

        Raises:
            ConfigError: there are none.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if rows is None:
            raise ConfigError("evaluate() needs data: give the trainer eval_dataset=..., or evaluate(data)")
        if isinstance(rows, Mapping):  # several data sets
            parts = [self._events.evaluated(self._timed(rows[name]), f"eval_{name}_") for name in rows]
            return {name: value for part in parts for name, value in part.items()}
        return self._events.evaluated(self._timed(rows))

    def _timed(self, rows: Any) -> dict[str, Any]:
        """The metrics of held-out data, and how long they took."""
        begun = time.monotonic()
        metrics = dict(self._evaluate(rows))
        seconds = max(time.monotonic() - begun, 1e-9)
        speed = {"samples_per_second": len(rows) / seconds} if hasattr(rows, "__len__") else {}
        return metrics | {"runtime": seconds} | speed

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model and its tokenizer as a Hugging Face directory; of a model with adapters, these alone.

        Args:
            output_dir: None: that of the arguments.
        """
        self.actor.save_pretrained(
            str(self._output() if output_dir is None else output_dir), adapter=has_adapters(self.actor.modules)
        )

    def _report(self, result: Mapping[str, Any], _: Any) -> None:
        self._events.evaluated(result["metrics"])

    @abstractmethod
    def _data(self, train_dataset: Any) -> tuple[Any, float]:
        """The loader of the training data, and the steps of an epoch."""

    @abstractmethod
    def _evaluate(self, rows: Any) -> Mapping[str, Any]:
        """Metrics of held-out data."""

    @abstractmethod
    def _held_out(self, rows: Any, every: int) -> HeldOut:
        """Held-out data as the trainer takes them."""

    def _algorithm(self) -> BaseAlgorithm:
        return make_algorithm(self.algorithm)

    def _source(self) -> Reward | None:
        return None

    def _sampling(self) -> dict[str, Any] | None:
        return None

    def _training(self) -> dict[str, Any]:
        """Further keywords of the actor."""
        return {}

    def _output(self) -> Path:
        return Path(self.args.output_dir or "trainer_output")

    def _checked(self, more: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in more.items():
            if name not in _OWN and not (value is None and name in _OTHERWISE):
                signatures = map(inspect.signature, (type(self).__init__, _Trainer.__init__))
                known = [*_OWN, *(parameter for one in signatures for parameter in one.parameters)]
                raise ConfigError(
                    f"{type(self).__name__} has no argument '{name}': {_OTHERWISE.get(name) or nearest(name, known)}"
                )
        return dict(more)

    def _actor(self, model: Any, tokenizer: Any, optimizer: Any, peft_config: Any, options: Mapping[str, Any]) -> Actor:
        args, files = self.args, None
        settings = {
            "gradient_checkpointing": args.gradient_checkpointing,
            "micro_batch_size": args.per_device_train_batch_size * self.rows,
            "use_amp": args.bf16 is True,
            **self._training(),
        }
        if isinstance(model, str | Path):
            model, settings = str(model), settings | args.model_settings()
        local = Controller.of(options.get("placement")).is_local
        if peft_config is not None and (not local or settings.get("dtype") == "int4"):
            settings["lora"] = lora_options(peft_config, model)
        elif peft_config is not None:
            if isinstance(model, str):
                kind: Any = "causal" if self.head == "lm" else "score"
                loading = ModelOptions(path=model, **{name: settings.pop(name) for name in args.model_settings()})
                files = ModelFiles.of(loading, kind, args.seed)
                model, tokenizer = files.load(), model if tokenizer is None else tokenizer
            model = with_adapters(
                as_classifier(model) if isinstance(model, ValueModel) else model, peft_config, args.seed
            )
        default = "vllm" if getattr(args, "use_vllm", False) else "embedded"
        actor = Actor(
            model,
            tokenizer,
            optim=optimizer,
            rollout=options.get("rollout") or default,
            sampling=self._sampling(),
            head=self.head,
            seed=args.seed,
            **settings,
        )
        self._shown = self._outside(model, actor)
        if files is not None:
            actor.base = LoraBase.of(files, actor.modules)  # which checkpoints leave where it is
        return actor

    def _outside(self, model: Any, actor: Actor) -> Any:
        """What a script has of the live model: peft's wrapper around it; None: the model itself."""
        return model if hasattr(model, "get_base_model") else None

    def _steps(self) -> int:
        """Steps of `trainer`."""
        if self.args.max_steps > 0:
            return math.ceil(int(self.args.max_steps) / self.updates)
        if not math.isfinite(self._per_epoch):
            raise ConfigError("the data have no length: say max_steps=...")
        return max(1, math.ceil(float(self.args.num_train_epochs) * self._per_epoch))

    def _every(self, what: str) -> int | None:
        """Steps of `trainer` from one evaluation, or save, to the next; None: never."""
        strategy, steps = getattr(self.args, f"{what}_strategy"), getattr(self.args, f"{what}_steps")
        if strategy in ("no", "epoch"):
            return None if strategy == "no" else max(1, math.ceil(self._per_epoch))
        steps = float(steps or self.args.logging_steps)
        return max(1, round(steps * self._total) if steps < 1 else math.ceil(steps / self.updates))

    def _trainer(self, source: Any, options: Mapping[str, Any]) -> ObservedTrainer:
        args, every = self.args, self._every("save")
        trainer = ObservedTrainer(
            self.actor,
            reward=source,
            algorithm=self._algorithm(),
            n=getattr(args, "num_generations", None),
            checkpoint_dir=None if every is None else self._output(),
            save_every=every,
            keep_checkpoints=None if every is None else args.save_total_limit,
            placement=options.get("placement") or ("cpu" if args.use_cpu else None),
            strategy=options.get("strategy"),
            logger=open_logger(
                self._output(),
                args.sinks(),
                run_id=args.run_name or self._output().name,
                project=args.project,
                total_steps=self._total,
            ),
        )
        trainer.events = self._events
        if isinstance(self.eval_dataset, Mapping) and args.eval_strategy != "no":
            raise ConfigError(
                f"eval_strategy='{args.eval_strategy}' is of one eval_dataset: call evaluate() for several"
            )
        if self.eval_dataset is not None and (often := self._every("eval")) is not None:
            trainer.held_out = self._held_out(self.eval_dataset, often)
            trainer.held_out.on_result = self._report
        return trainer


class GRPOTrainer(_Trainer):
    """TRL's `GRPOTrainer`: samples a group of completions to each prompt, and learns which of them are better.

    Args:
        model: a model, or the name or directory of one.
        reward_funcs: a function `f(prompts, completions, **columns)`, a reward model or its name, or a list of these,
            which `args.reward_weights` weighs. One that returns None for a completion is left out of its sum.
        args: `GRPOConfig`, or `transformers.TrainingArguments`.
        train_dataset, eval_dataset: rows with a column `prompt`, a text or messages; the other columns go to the
            rewards.
        processing_class: the tokenizer; None: the one beside the model.
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

    config = GRPOConfig
    algorithm = "grpo"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        tools: Sequence[Any] | None = None,
        environment_factory: Any = None,
        **more: Any,
    ) -> None:
        config = self.config.of(args)
        self._reward_funcs = reward_funcs or []
        if not self._reward_funcs and environment_factory is None:
            raise ConfigError("GRPOTrainer needs reward_funcs=..., or an environment_factory with get_reward()")
        self._episode = None
        if environment_factory is not None or tools:
            most = config.max_tool_calling_iterations
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

    @property
    def updates(self) -> int:  # type: ignore[override]
        updates: int = self.args.updates()
        return updates

    def _source(self) -> Reward | None:
        functions = self._reward_funcs if isinstance(self._reward_funcs, list | tuple) else [self._reward_funcs]
        if not functions:
            return None
        bound = [_with_extras(function, self._events) for function in functions]
        weights = self.args.reward_weights
        if len(bound) == 1 and weights is None:
            return Reward(bound[0])
        # TRL's rule: a sum over the rewards that have a number for the completion.
        return Reward(bound, weights=weights, partial=True)

    def _data(self, train_dataset: Any) -> tuple[Any, float]:
        args, count = self.args, self.args.prompts()
        has_length = hasattr(train_dataset, "__len__")
        data: Any = self._prompts(train_dataset) if has_length else stream_prompts(train_dataset)
        if not has_length and args.chat_template_kwargs:
            raise ConfigError("chat_template_kwargs with a stream: give its rows a column 'chat_template_kwargs'")
        if args.max_prompt_length is not None:
            data, _ = tokenize_prompts(
                data, self.actor.tokenizer, max_prompt_length=args.max_prompt_length, truncation="left"
            )
        if not has_length:
            return Prefetch(PromptLoader(data, count, seed=args.seed)), math.inf
        loader = PromptLoader(data, count, seed=args.seed, shuffle=args.shuffle_dataset)
        # What is left over at the end of an epoch begins the next one.
        return Prefetch(loader), len(data) / count

    def _prompts(self, rows: Any) -> PromptDataset:
        """Chats among them are written with `chat_template_kwargs`, beside those of the rows."""
        if self._episode is not None and len(rows) and "prompt" not in rows[0]:
            rows = [{**row, "prompt": _EMPTY} for row in rows]
        data, shared = load_prompts(rows), _options(self.args.chat_template_kwargs)
        if not shared or "messages" not in data.batch:
            return data
        columns = data.batch.select([name for name in ("messages", "chat_template_kwargs") if name in data.batch])
        merged = [json.dumps({**shared, **_options(row.get("chat_template_kwargs"))}) for row in columns.rows()]
        batch = data.batch.drop(["chat_template_kwargs"]).add({"chat_template_kwargs": merged})
        return PromptDataset(batch, data.name)

    def _evaluate(self, rows: Any) -> Mapping[str, Any]:
        return self.trainer.evaluate(self._prompts(rows).batch, **self._drawn()).metrics

    def _held_out(self, rows: Any, every: int) -> HeldOut:
        return HeldOut(self._prompts(rows), every, **self._drawn(), name="eval_dataset")

    def _drawn(self) -> dict[str, Any]:
        args = self.args
        return {"n": args.num_generations_eval or args.num_generations, "temperature": args.temperature}

    def _training(self) -> dict[str, Any]:
        samples, of_rollout = self.args.samples(), self.args.rollout_samples()
        return {
            "mini_batch_size": None if samples == of_rollout else samples,
            "epochs": self.args.num_iterations,
            "episode": self._episode,
        }

    def _sampling(self) -> dict[str, Any]:
        args = self.args
        return {
            "max_new_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k or 0,
            "min_p": args.min_p or 0.0,
        }

    def _algorithm(self) -> BaseAlgorithm:
        return grpo_algorithm(self.args)


class _Offline(_Trainer):
    """Learns from recorded responses."""

    reads: ClassVar[type[TRLLoader]] = TRLLoader

    def _data(self, train_dataset: Any) -> tuple[Any, float]:
        loader = self._recorded(train_dataset)
        return loader, math.ceil(len(loader) / loader.batch_size)

    def _recorded(self, rows: Any) -> TRLLoader:
        args = self.args
        args.check_rows()
        loader = self.reads(rows, self.actor.tokenizer, args, args.samples())
        if lost := {what: count for what, count in loader.counts.items() if what != "longest" and count}:
            logger.info("max_length=%s: %s", args.max_length, lost)
        return loader

    def _evaluate(self, rows: Any) -> Mapping[str, Any]:
        metrics = self.trainer.evaluate_loss(self._recorded(rows).batch)
        return {**metrics, "loss/actor": metrics["loss"]}

    def _held_out(self, rows: Any, every: int) -> HeldOut:
        return HeldOut(self._recorded(rows).batch, every, name="eval_dataset")


class SFTTrainer(_Offline):
    """TRL's `SFTTrainer`: the likelihood of completions, or of every turn of the assistant. Arguments as of
    `GRPOTrainer`, without rewards; `args` is a `SFTConfig`."""

    config = SFTConfig
    algorithm = "sft"
    reads = TextLoader

    def _algorithm(self) -> BaseAlgorithm:
        return make_algorithm(self.algorithm, loss_type=self.args.loss_type)


class RewardTrainer(_Offline):
    """TRL's `RewardTrainer`: a model that scores the chosen response above the rejected one. Arguments as of
    `SFTTrainer`; `args` is a `RewardConfig`."""

    config = RewardConfig
    algorithm = "reward_model"
    head = "score"
    rows = 2
    reads = ScoredLoader

    def _data(self, train_dataset: Any) -> tuple[Any, float]:
        data = super()._data(train_dataset)
        setattr(self.actor.modules.config, SCORE_AT_EOS, data[0].at_eos)  # which token `verl.Reward` is to read
        return data

    def _outside(self, model: Any, actor: Actor) -> Any:
        """A sequence classifier over the weights that are trained, within peft's wrapper if there is one."""
        scored: Any = actor.modules
        if actor.files is not None:  # read by other processes
            return None
        adapted = super()._outside(model, actor)
        classifier = model if adapted is None else adapted.get_base_model()
        if not hasattr(classifier, "num_labels"):
            with suppress(ValueError):  # transformers may have no classifier of that kind
                return as_classifier(scored)
            return None
        share_head(scored, classifier)
        score = scored.score.weight
        if not score.requires_grad and not score.any():
            raise ConfigError("peft_config: the head is a new one, which is trained with task_type='SEQ_CLS'")
        return model

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model and its tokenizer as a Hugging Face directory; of a model with adapters, these and the head
        that is trained, where `model` is peft's, else the whole model with its adapters merged."""
        model, folder = self.model, str(self._output() if output_dir is None else output_dir)
        if hasattr(model, "get_base_model"):
            model.save_pretrained(folder)
            self.processing_class.save_pretrained(folder)
        else:
            self.actor.save_pretrained(folder)

    def _algorithm(self) -> BaseAlgorithm:
        return make_algorithm(self.algorithm, center_rewards_coefficient=self.args.center_rewards_coefficient or 0.0)


class _WithReference(_Offline):
    """Learns beside a frozen reference: `ref_model`, or (None) the model as it is at first."""

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **more: Any) -> None:
        self._reference = ref_model
        super().__init__(model, args, **more)

    def _actor(self, *args: Any) -> Actor:
        actor = super()._actor(*args)
        if self._reference is not None:
            actor.make_reference(self._reference)
        return actor


class DPOTrainer(_WithReference):
    """TRL's `DPOTrainer`, on pairs of a chosen and a rejected response; `args` is a `DPOConfig`."""

    config = DPOConfig
    algorithm = "dpo"
    rows = 2
    reads = PairLoader

    def _algorithm(self) -> BaseAlgorithm:
        return dpo_algorithm(self.args)


class KTOTrainer(_WithReference):
    """TRL's `KTOTrainer`, on responses with a label, or pairs; `args` is a `KTOConfig`."""

    config = KTOConfig
    algorithm = "kto"
    reads = LabelledLoader

    def _algorithm(self) -> BaseAlgorithm:
        args = self.args
        each = {"kl_rows": args.per_device_train_batch_size * torchrun_ranks()} if args.loss_type == "kto" else {}
        return make_algorithm(
            self.algorithm,
            beta=args.beta,
            desirable_weight=args.desirable_weight,
            undesirable_weight=args.undesirable_weight,
            loss_type=args.loss_type,
            **each,
        )


def _options(value: Any) -> dict[str, Any]:
    """`chat_template_kwargs`, which may be JSON or None."""
    return dict((json.loads(value) if isinstance(value, str) else value) or {})


def _with_extras(source: Any, events: Events) -> Any:
    """A reward function that gets what it takes of `trainer_state`, `log_metric` and `log_extra` (whose columns nobody
    shows here), and, as there, all completions of a step at once."""
    if not callable(source) or hasattr(source, "forward"):
        return source
    try:
        parameters = inspect.signature(source).parameters
    except (TypeError, ValueError):  # compiled code may have no signature
        return source
    if OF_TRL.isdisjoint(parameters):
        return source
    extras = {"trainer_state": events.state, "log_metric": events.log_metric, "log_extra": lambda column, values: None}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    taken = {name: value for name, value in extras.items() if takes_all or name in parameters}
    bound = partial(source, **taken)
    bound.whole_batch, bound.process = True, not taken  # type: ignore[attr-defined]  # a process would see an old state
    return bound
