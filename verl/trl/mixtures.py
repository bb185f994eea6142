"""TRL's mixtures of data sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.errors import ConfigError


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
        rows = datasets.load_dataset(
            config.path,
            config.name,
            data_dir=config.data_dir,
            data_files=config.data_files,
            split=config.split,
            streaming=mixture_config.streaming,
        )
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
