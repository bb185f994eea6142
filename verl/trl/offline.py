"""TRL's trainers on recorded responses, by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from verl.algorithms import make_algorithm
from verl.errors import ConfigError
from verl.models.heads import SCORE_AT_EOS, as_classifier, share_head
from verl.roles.actor import Actor
from verl.trl.arguments import DPOConfig, KTOConfig, RewardConfig, SFTConfig
from verl.trl.data import LabelledLoader, PairLoader, ScoredLoader, TextLoader, TokenRows, TRLLoader
from verl.trl.losses import dpo_algorithm, kto_algorithm
from verl.trl.trainers import BaseTrainer

logger = logging.getLogger(__name__)


class _Offline(BaseTrainer):
    """Learns from recorded responses."""

    reads: ClassVar[type[TRLLoader]] = TRLLoader

    def _data(self) -> tuple[Any, float]:
        """As in TRL, what a trainer holds are tokens."""
        if path := getattr(self.args, "chat_template_path", None):
            if not Path(path).is_file():
                raise ConfigError(f"chat_template_path='{path}' is no file: set the tokenizer's chat_template")
            self.processing_class.chat_template = Path(path).read_text()
        loader, held_out = self._recorded(self._finite(self.train_dataset)), self.eval_dataset
        self.train_dataset = TokenRows(loader)
        if isinstance(held_out, Mapping):
            self.eval_dataset = {name: TokenRows(self._recorded(rows)) for name, rows in held_out.items()}
        elif held_out is not None:
            self.eval_dataset = TokenRows(self._recorded(held_out))
        return loader, math.ceil(len(loader) / loader.batch_size)

    def _finite(self, rows: Any) -> Any:
        """The rows of a stream that `max_steps` steps read, in its order."""
        if hasattr(rows, "__len__"):
            return rows
        args = self.args
        if args.max_steps <= 0:
            raise ConfigError("the data have no length: say max_steps=...")
        args.read_here()
        args.train_sampling_strategy = "sequential"
        if hasattr(args, "shuffle_dataset"):
            args.shuffle_dataset = False
        return list(islice(rows, int(args.max_steps) * args.samples()))

    def _recorded(self, rows: Any) -> TRLLoader:
        args = self.args
        if isinstance(rows, TokenRows):
            return rows.loader
        rows = rows if hasattr(rows, "__len__") else list(rows)
        loader = self.reads(rows, self.actor.tokenizer, args, args.samples())
        if lost := {what: count for what, count in loader.counts.items() if what != "longest" and count}:
            logger.info("max_length=%s: %s", args.max_length, lost)
        return loader

    def _evaluate(self, rows: Any) -> Mapping[str, Any]:
        metrics = self.trainer.evaluate_loss(self._recorded(rows).batch)
        return {**metrics, "loss/actor": metrics["loss"]}


class SFTTrainer(_Offline):
    """TRL's `SFTTrainer`: the likelihood of completions, or of every turn of the assistant. Arguments as of
    `GRPOTrainer`, without rewards; `args` is a `SFTConfig`."""

    config = SFTConfig
    algorithm = staticmethod(lambda args: make_algorithm("sft", loss_type=args.loss_type))
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


class RewardTrainer(_Offline):
    """TRL's `RewardTrainer`: a model that scores the chosen response above the rejected one. Arguments as of
    `SFTTrainer`; `args` is a `RewardConfig`."""

    config = RewardConfig
    algorithm = staticmethod(
        lambda args: make_algorithm("reward_model", center_rewards_coefficient=args.center_rewards_coefficient or 0.0)
    )
    tag = "reward-trainer"
    head = "score"
    rows = 2
    reads = ScoredLoader

    def __init__(self, model: Any, args: Any = None, **more: Any) -> None:
        if "SequenceClassification" in type(model).__name__ and model.config.num_labels != 1:
            raise ConfigError(f"reward models require `num_labels=1`, this one has {model.config.num_labels}")
        super().__init__(model, args, **more)

    def _data(self) -> tuple[Any, float]:
        data = super()._data()
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
        model, folder = self.model, str(output_dir or self._folder)
        if hasattr(model, "get_base_model"):
            model.save_pretrained(folder)
            self.processing_class.save_pretrained(folder)
        else:
            self.actor.save_pretrained(folder)


class _WithReference(_Offline):
    """Has a frozen reference policy: `ref_model`, or (None) the initial model."""

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **more: Any) -> None:
        if ref_model is model and not isinstance(model, str):
            raise ConfigError("ref_model is the model that is trained: leave it out, and a copy is made")
        self._reference = ref_model
        super().__init__(model, args, **more)

    def _data(self) -> tuple[Any, float]:
        held_out = self.eval_dataset.values() if isinstance(self.eval_dataset, Mapping) else [self.eval_dataset]
        for rows in (self.train_dataset, *held_out):
            if rows is not None and not hasattr(rows, "__len__") and self.args.precompute_ref_log_probs:
                raise ConfigError("precompute_ref_log_probs=True is not supported with IterableDataset: leave it out")
        return super()._data()

    def _actor(self, *args: Any) -> Actor:
        actor = super()._actor(*args)
        if self._reference is not None:
            actor.make_reference(self._reference)
        return actor


class DPOTrainer(_WithReference):
    """TRL's `DPOTrainer`, on pairs of a chosen and a rejected response; `args` is a `DPOConfig`."""

    config = DPOConfig
    algorithm = staticmethod(dpo_algorithm)
    tag = "dpo"
    rows = 2
    reads = PairLoader


class KTOTrainer(_WithReference):
    """TRL's `KTOTrainer`, on responses with a label, or pairs; `args` is a `KTOConfig`."""

    config = KTOConfig
    algorithm = staticmethod(kto_algorithm)
    tag = "kto"
    reads = LabelledLoader
