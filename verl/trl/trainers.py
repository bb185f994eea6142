"""The base of TRL's trainers: one mapping of their arguments."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NoReturn

from transformers.trainer_pt_utils import log_metrics, metrics_format, save_metrics, save_state
from transformers.trainer_utils import TrainOutput

from verl._host.ranks import torchrun_ranks
from verl.algorithms import BaseAlgorithm, PolicyGradient
from verl.cluster.controller import Controller
from verl.errors import ConfigError, nearest
from verl.models.heads import ValueModel, as_classifier
from verl.models.lora import has_adapters
from verl.models.options import ModelOptions
from verl.models.source import ModelFiles
from verl.report.sinks import open_logger
from verl.roles.actor import Actor
from verl.roles.handle import LoraBase
from verl.roles.reward import Reward
from verl.trainer.trainer import Trainer
from verl.trl.arguments import Config
from verl.trl.entries import entries_of
from verl.trl.events import Events, ObservedTrainer
from verl.trl.optim import lr_factor, optim_settings
from verl.trl.peft import lora_options, with_adapters

logger = logging.getLogger(__name__)

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


class BaseTrainer(Events):
    """What all of them share.

    Attributes:
        actor, trainer, loader: the `Actor`, the `Trainer` and the batches that the arguments have become.
        args: the arguments, as a `Config`.

    Raises:
        ConfigError: an argument is unknown, or is done otherwise here; the message names what to do.
    """

    config: ClassVar[type[Config]]
    #: From the arguments.
    algorithm: Callable[[Any], BaseAlgorithm]
    #: What TRL calls the method in the tags of a model.
    tag: ClassVar[str]
    head: ClassVar[Literal["lm", "score"]] = "lm"
    #: Rows of a sample: two of a preference.
    rows: ClassVar[int] = 1
    #: The loader of `train_dataset`, and the steps of an epoch.
    _data: Callable[[], tuple[Any, float]]
    #: The reward, of samples; and further keywords of the actor.
    _source: Callable[[], Reward | None] = staticmethod(lambda: None)
    _training: Callable[[], dict[str, Any]] = staticmethod(dict)
    #: What a script has of the live model, where it is another object: see `_outside`.
    _shown: Any = None
    #: No loss balances the experts of a model, and it is uploaded nowhere.
    aux_loss_enabled, hub_model_id = False, None

    # Scripts of transformers read these of a trainer: files of metrics, ranks, loaders, schedules.
    log_metrics, metrics_format, save_metrics, save_state = log_metrics, metrics_format, save_metrics, save_state

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
        placement: Any = None,
        strategy: Any = None,
        rollout: Any = None,
        **more: Any,
    ) -> None:
        for name, value in more.items():
            if value is not None or name not in _OTHERWISE:
                signatures = map(inspect.signature, (type(self).__init__, BaseTrainer.__init__))
                hint = _OTHERWISE.get(name) or nearest(name, [each for one in signatures for each in one.parameters])
                raise ConfigError(f"{type(self).__name__} has no argument '{name}': {hint}")
        if train_dataset is None:
            raise ConfigError(f"`train_dataset` is required: {type(self).__name__} needs train_dataset=...")
        self.args: Any = self.config.of(args)
        self._folder = Path(self.args.output_dir or "trainer_output")
        if eval_dataset is None and self.args.eval_strategy != "no":
            raise ConfigError(
                f"eval_strategy='{self.args.eval_strategy}', and there is nothing to evaluate on: give eval_dataset=..."
            )
        optimizer, schedule = self._optimizers = optimizers
        self.actor = self._actor(model, processing_class, optimizer, peft_config, placement, rollout)
        self.processing_class = self.tokenizer = self.actor.tokenizer  # transformers' former name
        self._check_model(self.actor.modules)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.loader, self._per_epoch = self._data()
        self._total = self._steps()
        if optimizer is None:
            self.actor.train_with(**optim_settings(self.args, self._total * self.updates))
        elif schedule is not None:
            self.actor.train_with(scheduler=schedule)
        about = {"model": self._shown or self.actor.modules, "processing_class": self.processing_class}
        self._observe(args if hasattr(args, "learning_rate") else self.args, callbacks or (), about)
        self.trainer: Trainer = self._trainer(placement, strategy)
        self.call_event("on_init_end")

    @property
    def model(self) -> Any:
        """The model, with the weights as they are now: with adapters a `peft.PeftModel`, of a reward model a sequence
        classifier, where this process trains it."""
        live = self.actor.present_model()
        shown = self._shown
        return live if shown is None or next(shown.parameters()) is not next(live.parameters()) else shown

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Any:
        """Train to the end; `transformers.trainer_utils.TrainOutput`.

        Args:
            resume_from_checkpoint: True: from the newest checkpoint in `output_dir`; or the path of one.
        """
        if resume_from_checkpoint is True:
            self.trainer.resume()
        elif resume_from_checkpoint:
            self.trainer.load_checkpoint(resume_from_checkpoint)
        self._begin()
        if self.trainer.steps < self._total:
            self.trainer.fit(self.loader, self._total - self.trainer.steps)
        metrics = self._finish() | {"epoch": self.state.epoch}
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model and its tokenizer as a Hugging Face directory; of a model with adapters, these alone.

        Args:
            output_dir: None: `args.output_dir`.
        """
        self.actor.save_pretrained(str(output_dir or self._folder), adapter=has_adapters(self.actor.modules))

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

    def _actor(
        self, model: Any, tokenizer: Any, optimizer: Any, peft_config: Any, placement: Any, rollout: Any
    ) -> Actor:
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
        local = Controller.of(placement).is_local
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
            rollout=rollout or default,
            head=self.head,
            seed=args.seed,
            **settings,
        )
        self._shown = self._outside(model, actor)
        if files is not None:
            actor.base = LoraBase.of(files, actor.modules)  # which checkpoints leave where it is
        return actor

    def _outside(self, model: Any, actor: Actor) -> Any:
        """The object that a script sees as the model: peft's wrapper; None: the model itself."""
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

    def _trainer(self, placement: Any, strategy: Any) -> ObservedTrainer:
        args, every, algorithm = self.args, self._every("save"), self.algorithm(self.args)
        algorithm.further_metrics = entries_of(algorithm, getattr(args, "loss_type", None))
        if isinstance(algorithm, PolicyGradient):
            algorithm.kl_bound = math.inf  # TRL has none
        trainer = ObservedTrainer(
            self.actor,
            reward=self._source(),
            algorithm=algorithm,
            n=getattr(args, "num_generations", None),
            checkpoint_dir=None if every is None else self._folder,
            save_every=every,
            keep_checkpoints=None if every is None else args.save_total_limit,
            placement=placement or ("cpu" if args.use_cpu else None),
            strategy=strategy,
            logger=open_logger(
                self._folder,
                args.sinks(),
                run_id=args.run_name or self._folder.name,
                project=args.project,
                total_steps=self._total,
            ),
        )
        trainer.events = self
        self._eval_every = 0 if self.eval_dataset is None else self._every("eval") or 0
        return trainer

    @property
    def accelerator(self) -> Any:
        """What scripts ask Accelerate for. The process that a script runs in is the main one."""
        return SimpleNamespace(
            print=print,
            is_main_process=True,
            is_local_main_process=True,
            process_index=0,
            num_processes=torchrun_ranks(),
            wait_for_everyone=lambda: None,
            unwrap_model=lambda model: model,
        )

    @property
    def ref_model(self) -> Any:
        """The reference policy; None without a reference, or if it is the model without its adapters."""
        return self.actor.reference.model

    is_world_process_zero = is_local_process_zero = staticmethod(lambda: True)

    def get_train_dataloader(self) -> Any:
        """The loader that training draws from, without end: rows as `verl.Batch`es."""
        return self.loader

    @property
    def optimizer(self) -> Any:
        """The caller's, else what torch's `param_groups` say of the one here: its weights, learning rate and decay."""
        if self._optimizers[0] is not None:
            return self._optimizers[0]
        weights = [weight for weight in self.actor.modules.parameters() if weight.requires_grad]
        (rate,) = self.lr_scheduler.get_last_lr()
        return SimpleNamespace(param_groups=[{"params": weights, "lr": rate, "weight_decay": self.args.weight_decay}])

    @property
    def lr_scheduler(self) -> Any:
        """The caller's, else one that says the learning rate of the next step."""
        if self._optimizers[0] is not None:
            return self._optimizers[1]
        step = self.state.global_step
        rate = self.args.learning_rate * lr_factor(self.args, self.state.max_steps)(step)
        return SimpleNamespace(get_last_lr=lambda: [rate], last_epoch=step)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ConfigError: nothing is uploaded."""
        raise ConfigError("push_to_hub: nothing is uploaded here: call save_model(), and upload that directory")

    #: Does nothing: `output_dir` has the report. Nor does `end`: trackers close when the process ends.
    create_model_card = end = staticmethod(lambda *args, **kwargs: None)
