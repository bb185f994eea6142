"""TRL's records of a script's command line, its parser, which reads a YAML file, too, and its mixtures of data sets."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from transformers import HfArgumentParser

from verl.errors import ConfigError, nearest


@dataclass
class ScriptArguments:
    """Which data a script reads, by their name or path in `datasets.load_dataset`."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


@dataclass
class ModelConfig:
    """Which model a script trains, and its adapters."""

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = "float32"
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("load_in_8bit and load_in_4bit are two forms of one model: give one")
        targets = self.lora_target_modules
        if targets is not None and len(targets) == 1:  # "all-linear", or a pattern
            self.lora_target_modules = targets[0]  # type: ignore[assignment]


class TrlParser(HfArgumentParser):
    """`HfArgumentParser` of which a YAML file (`--config FILE`) gives defaults; its `env` sets the environment."""

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """Records, and with `return_remaining_strings` a list of what belongs to none.

        Raises:
            ConfigError: the file has a setting of no record, unless `fail_with_unknown_args` is false; or a setting is
                one of TRL's that is not done here.
        """
        words = list(sys.argv[1:] if args is None else args)
        settings: dict[str, Any] = {}
        if "--config" in words:
            position = words.index("--config")
            settings = yaml.safe_load(Path(words[position + 1]).read_text()) or {}
            del words[position : position + 2]
        os.environ.update({name: str(value) for name, value in (settings.pop("env", None) or {}).items()})
        known = {action.dest for action in self._actions}
        unknown = [name for name in settings if name not in known]
        if unknown and fail_with_unknown_args and not return_remaining_strings:
            raise ConfigError(f"--config has '{unknown[0]}', which is of no record: {nearest(unknown[0], known)}")
        self.set_defaults(**{name: value for name, value in settings.items() if name in known})
        for action in self._actions:
            action.required = action.required and action.dest not in settings
        rest = [word for name in unknown for word in (f"--{name}", str(settings[name]))]
        *records, others = self.parse_args_into_dataclasses(args=words, return_remaining_strings=True)
        left = [*rest, *others]
        if return_remaining_strings:
            return (*records, left)
        if left and fail_with_unknown_args:
            raise ConfigError(f"'{left[0]}' is of no record: {nearest(left[0].removeprefix('--'), known)}")
        return tuple(records)


@dataclass
class DatasetConfig:
    """Arguments of `datasets.load_dataset`; and which columns are kept, and which share of the mixture it is."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: Any = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Data sets one after the other; with `test_split_size`, some of their rows as a split `test`."""

    datasets: list[DatasetConfig] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        self.datasets = [DatasetConfig(**part) if isinstance(part, dict) else part for part in self.datasets]


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """A `datasets.DatasetDict` with a split `train`, and `test` if it is asked for.

    Of data sets with a `fraction` there are as many first rows as give these shares without any row twice.

    Raises:
        ConfigError: `datasets` is not installed; there is no data set; fractions are no shares, or are not of all data
            sets, or of a stream.
    """
    try:
        import datasets  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError("get_dataset needs datasets, which is not installed: pip install datasets") from error
    if not mixture_config.datasets:
        raise ConfigError("No datasets were loaded from the mixture configuration: name one in datasets")
    parts = []
    for config in mixture_config.datasets:
        named = {name: value for name, value in vars(config).items() if name not in ("columns", "fraction")}
        rows = datasets.load_dataset(**named, streaming=mixture_config.streaming)
        parts.append(rows if config.columns is None else rows.select_columns(config.columns))
    shares = [config.fraction for config in mixture_config.datasets if config.fraction is not None]
    if shares:
        if len(shares) < len(parts) or mixture_config.streaming:
            raise ConfigError("`fraction` must be set for either all datasets or none, and not with streaming")
        if min(shares) < 0 or not any(shares):
            raise ConfigError(f"`fraction` is a share, at least one of them above 0, not {shares}")
        total = min(len(rows) / share for rows, share in zip(parts, shares, strict=True) if share)
        parts = [rows.select(range(round(share * total))) for rows, share in zip(parts, shares, strict=True)]
    whole = datasets.concatenate_datasets(parts)
    if mixture_config.test_split_size is not None:
        return whole.train_test_split(test_size=mixture_config.test_split_size)
    return datasets.DatasetDict({"train": whole})
