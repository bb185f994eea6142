"""What TRL's trainers share, one mapping of arguments, and those on recorded responses by name."""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from verl._host.ranks import torchrun_ranks
from verl.algorithms import BaseAlgorithm, PolicyGradient, make_algorithm
from verl.cluster.controller import Controller
from verl.errors import ConfigError, nearest
from verl.models.heads import SCORE_AT_EOS, ValueModel, as_classifier, share_head
from verl.models.lora import has_adapters
from verl.models.options import ModelOptions
from verl.models.source import ModelFiles
from verl.report.sinks import open_logger
from verl.roles.actor import Actor
from verl.roles.handle import LoraBase
from verl.roles.reward import Reward
from verl.trainer.evaluation import HeldOut
from verl.training.options import OptimConfig
from verl.trl.arguments import Config, DPOConfig, KTOConfig, RewardConfig, SFTConfig
from verl.trl.attributes import Attributes
from verl.trl.data import LabelledLoader, PairLoader, ScoredLoader, TextLoader, TokenRows, TRLLoader
from verl.trl.entries import entries_of
from verl.trl.events import Events, ObservedTrainer
from verl.trl.losses import dpo_algorithm
from verl.trl.optim import optim_settings
from verl.trl.peft import lora_options, with_adapters

logger = logging.getLogger(__name__)

#: Arguments of this package's that every trainer takes besides TRL's: see `Trainer` and `Actor`.
_OWN = ("placement", "strategy", "rollout")
#: An argument of TRL's -> what to do in its place.
_OTHERWISE = {
    "tokenizer": "it is processing_class",
    "dataset": "it is train_dataset",
    "data_collator": "rows are packed, not collated: leave it out",
    "compute_metrics": "use trainer.trainer.add_metric(name, fn)",
    "compute_loss_func": "write an algorithm, see docs/algorithms.md",
    "preprocess_logits_for_metrics": "leave it out",
    "optimizer_cls_and_kwargs": "pass optimizers=(optimizer, None)",
    "quantization_config": "train adapters over 4 bits with verl.Actor(model, dtype='int4', lora={...})",
    "reward_model": "it is reward_funcs",
    "reward_function": "it is reward_funcs",
    "max_length": "it is of args: SFTConfig(max_length=...)",
    "max_steps": "it is of args: GRPOConfig(max_steps=...)",
    "rollout_func": "see docs/episodes.md",
}


class BaseTrainer(Attributes, ABC):
    """What all of them share.

    Attributes:
        actor, trainer, loader: the `Actor`, the `Trainer` and the batches that the arguments have become.
        args: the arguments, as a `Config`.

    Raises:
        ConfigError: an argument is unknown, or is done otherwise here; the message names what to do.
    """

    config: ClassVar[type[Config]]
    #: What TRL calls the method in the tags of a model.
    tag: ClassVar[str]
    head: ClassVar[Literal["lm", "score"]] = "lm"
    #: Rows of a sample: two of a preference.
    rows: ClassVar[int] = 1
    #: What a script has of the live model, where it is another object: see `_outside`.
    _shown: Any = None
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
            raise ConfigError(f"`train_dataset` is required: {type(self).__name__} needs train_dataset=...")
        self.args: Any = self.config.of(args)
        if eval_dataset is None and self.args.eval_strategy != "no":
            raise ConfigError(
                f"eval_strategy='{self.args.eval_strategy}', and there is nothing to evaluate on: give eval_dataset=..."
            )
        optimizer, schedule = self._optimizers = optimizers
        self.actor = self._actor(model, processing_class, optimizer, peft_config, options)
        self.processing_class = self.actor.tokenizer
        self._check_model(self.actor.modules)
        self.loader, self._per_epoch = self._data(train_dataset)
        self._hold(train_dataset, eval_dataset)
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
            parts = [self._measure(rows[name], f"eval_{name}_") for name in rows]
            return {name: value for part in parts for name, value in part.items()}
        return self._measure(rows, "eval_")

    def _measure(self, rows: Any, prefix: str) -> dict[str, float]:
        self._events.begin_evaluation()
        return self._events.evaluated(self._evaluate(rows), rows, prefix)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model and its tokenizer as a Hugging Face directory; of a model with adapters, these alone.

        Args:
            output_dir: None: that of the arguments.
        """
        self.actor.save_pretrained(
            str(self._output() if output_dir is None else output_dir), adapter=has_adapters(self.actor.modules)
        )

    def _report(self, result: Mapping[str, Any], evaluation: Any) -> None:
        self._events.evaluated(result["metrics"], self.eval_dataset)

    def _evaluate_several(self) -> None:
        measured = self.evaluate()
        self.trainer.logger.log(
            self.trainer.steps, {f"eval/{name.removeprefix('eval_')}": value for name, value in measured.items()}
        )

    def _check_model(self, model: Any) -> None:
        """Raises ConfigError where TRL adds a loss that balances the experts; and adds TRL's tags to the model."""
        config = model.config.get_text_config()
        balances = hasattr(config, "output_router_logits") and getattr(config, "router_aux_loss_coef", None)
        if balances and self.args.router_aux_loss_coef is None:
            raise ConfigError(
                f"{type(model).__name__} has experts, whose balancing loss TRL adds, and there is none here: set "
                "router_aux_loss_coef=0.0"
            )
        tags = [*(getattr(model, "model_tags", None) or ()), self.tag, "trl"]
        for tagged in (model, self._shown or model):
            tagged.model_tags = tags

    def _hold(self, train_dataset: Any, eval_dataset: Any) -> None:
        """Keep the data as attributes."""
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset

    @abstractmethod
    def _data(self, train_dataset: Any) -> tuple[Any, float]:
        """The loader of the training data, and the steps of an epoch."""

    @abstractmethod
    def _evaluate(self, rows: Any) -> Mapping[str, Any]:
        """Metrics of held-out data, as `Trainer` names them."""

    @abstractmethod
    def _held_out(self, rows: Any, every: int) -> HeldOut:
        """Held-out data as the trainer takes them."""

    @abstractmethod
    def _algorithm(self) -> BaseAlgorithm:
        """What the arguments name."""

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
                signatures = map(inspect.signature, (type(self).__init__, BaseTrainer.__init__))
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
        if getattr(peft_config, "lora_dropout", 0):
            logger.warning(
                "peft_config: lora_dropout=%s is not applied: nothing is dropped here", peft_config.lora_dropout
            )
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
        args, every, algorithm = self.args, self._every("save"), self._algorithm()
        algorithm.further_metrics = entries_of(algorithm, getattr(args, "loss_type", None))
        if isinstance(algorithm, PolicyGradient):
            algorithm.kl_bound = math.inf  # TRL has none
        trainer = ObservedTrainer(
            self.actor,
            reward=source,
            algorithm=algorithm,
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
        often = self._every("eval")
        if isinstance(self.eval_dataset, Mapping) and often is not None:
            self._events.evaluate_every(often, self._evaluate_several)
        elif self.eval_dataset is not None and often is not None:
            trainer.held_out = self._held_out(self.eval_dataset, often)
            trainer.held_out.on_result = self._report
        return trainer


class _Offline(BaseTrainer):
    """Learns from recorded responses."""

    reads: ClassVar[type[TRLLoader]] = TRLLoader

    def _data(self, train_dataset: Any) -> tuple[Any, float]:
        if path := getattr(self.args, "chat_template_path", None):
            if not Path(path).is_file():
                raise ConfigError(f"chat_template_path='{path}' is no file: set the tokenizer's chat_template")
            self.processing_class.chat_template = Path(path).read_text()
        loader = self._recorded(self._finite(train_dataset))
        return loader, math.ceil(len(loader) / loader.batch_size)

    def _hold(self, train_dataset: Any, eval_dataset: Any) -> None:
        """As there, what a trainer holds are tokens."""
        self.train_dataset = TokenRows(self.loader)
        if isinstance(eval_dataset, Mapping):
            self.eval_dataset: Any = {name: TokenRows(self._recorded(rows)) for name, rows in eval_dataset.items()}
        else:
            self.eval_dataset = None if eval_dataset is None else TokenRows(self._recorded(eval_dataset))

    def _finite(self, rows: Any) -> Any:
        """Of a stream what `max_steps` read of it, in its order."""
        if hasattr(rows, "__len__"):
            return rows
        self._check_stream()
        args = self.args
        if args.max_steps <= 0:
            raise ConfigError("the data have no length: say max_steps=...")
        args.read_here()
        args.train_sampling_strategy = "sequential"
        if hasattr(args, "shuffle_dataset"):
            args.shuffle_dataset = False
        return list(islice(rows, int(args.max_steps) * args.samples()))

    def _check_stream(self) -> None:
        """Raises ConfigError for an argument that does not go with rows without a length."""

    def _recorded(self, rows: Any) -> TRLLoader:
        args = self.args
        if isinstance(rows, TokenRows):
            return rows.loader
        if not hasattr(rows, "__len__"):
            self._check_stream()
            rows = list(rows)
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
    tag = "sft"
    reads = TextLoader

    def __init__(self, model: Any, args: Any = None, *, formatting_func: Any = None, **more: Any) -> None:
        self._formatted = formatting_func
        super().__init__(model, args, **more)

    def _recorded(self, rows: Any) -> TRLLoader:
        field = self.args.dataset_text_field
        if not isinstance(rows, TokenRows) and self._formatted is not None:
            rows = [{"text": self._formatted(row)} for row in rows]
        elif not isinstance(rows, TokenRows) and field != "text" and field in next(iter(rows), {}):
            rows = [{"text": row[field]} for row in rows]
        return super()._recorded(rows)

    def _algorithm(self) -> BaseAlgorithm:
        return make_algorithm("sft", loss_type=self.args.loss_type)


class RewardTrainer(_Offline):
    """TRL's `RewardTrainer`: a model that scores the chosen response above the rejected one. Arguments as of
    `SFTTrainer`; `args` is a `RewardConfig`."""

    config = RewardConfig
    tag = "reward-trainer"
    head = "score"
    rows = 2
    reads = ScoredLoader

    def __init__(self, model: Any, args: Any = None, **more: Any) -> None:
        if "SequenceClassification" in type(model).__name__ and model.config.num_labels != 1:
            raise ConfigError(f"reward models require `num_labels=1`, this one has {model.config.num_labels}")
        super().__init__(model, args, **more)

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
        return make_algorithm("reward_model", center_rewards_coefficient=self.args.center_rewards_coefficient or 0.0)


class _WithReference(_Offline):
    """Learns beside a frozen reference: `ref_model`, or (None) the model as it is at first."""

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **more: Any) -> None:
        if ref_model is model and not isinstance(model, str):
            raise ConfigError("ref_model is the model that is trained: leave it out, and a copy is made")
        self._reference = ref_model
        super().__init__(model, args, **more)

    def _check_stream(self) -> None:
        if self.args.precompute_ref_log_probs:
            raise ConfigError("precompute_ref_log_probs=True is not supported with IterableDataset: leave it out")

    def _actor(self, *args: Any) -> Actor:
        actor = super()._actor(*args)
        if self._reference is not None:
            actor.make_reference(self._reference)
        return actor


class DPOTrainer(_WithReference):
    """TRL's `DPOTrainer`, on pairs of a chosen and a rejected response; `args` is a `DPOConfig`."""

    config = DPOConfig
    tag = "dpo"
    rows = 2
    reads = PairLoader

    def _algorithm(self) -> BaseAlgorithm:
        return dpo_algorithm(self.args)


class KTOTrainer(_WithReference):
    """TRL's `KTOTrainer`, on responses with a label, or pairs; `args` is a `KTOConfig`."""

    config = KTOConfig
    tag = "kto"
    reads = LabelledLoader

    def _algorithm(self) -> BaseAlgorithm:
        args = self.args
        each = {"kl_rows": args.per_device_train_batch_size * torchrun_ranks()} if args.loss_type == "kto" else {}
        return make_algorithm(
            "kto",
            beta=args.beta,
            desirable_weight=args.desirable_weight,
            undesirable_weight=args.undesirable_weight,
            loss_type=args.loss_type,
            **each,
        )
