"""What scripts read of a trainer of transformers besides training: files of metrics, ranks, loaders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

from transformers.trainer_pt_utils import log_metrics, metrics_format, save_metrics, save_state

from verl._host.ranks import torchrun_ranks
from verl.errors import ConfigError
from verl.trl.optim import lr_factor


class Attributes:
    """Needs `args`, `state`, `loader`, `actor`, `trainer` and what the caller gave as `optimizers`."""

    #: There is no loss that balances the experts of a model.
    aux_loss_enabled = False

    args: Any
    state: Any
    loader: Any
    actor: Any
    _optimizers: tuple[Any, Any]

    log_metrics, metrics_format, save_metrics, save_state = log_metrics, metrics_format, save_metrics, save_state

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
        """The reference policy; None where there is none, or it is the model without its adapters."""
        return self.actor.reference_model

    @property
    def tokenizer(self) -> Any:
        """transformers' former name of `processing_class`."""
        return self.actor.tokenizer

    def is_world_process_zero(self) -> bool:
        return True

    def is_local_process_zero(self) -> bool:
        return True

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

    @property
    def hub_model_id(self) -> str | None:
        """Where a model would be uploaded."""
        name: str | None = self.args.hub_model_id
        return name

    def end(self) -> None:
        """Nothing: trackers are closed when the process ends."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes nothing: a saved model has its report beside it."""
