"""Settings of a run: the schema, reading YAML with `key=value` overrides, and the identity of a run."""

from verl.config.document import Key, commented_yaml, describe, markdown
from verl.config.load import build_config, load_config, to_yaml
from verl.config.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgorithmConfig,
    Config,
    CriticConfig,
    DataConfig,
    FSDPConfig,
    ModelConfig,
    RefConfig,
    RewardComponent,
    RewardConfig,
    RewardPart,
    RolloutConfig,
    TrainerConfig,
    UpdateConfig,
    config_hash,
    run_id,
)
from verl.training.options import OptimConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "FSDPConfig",
    "Key",
    "ModelConfig",
    "OptimConfig",
    "RefConfig",
    "RewardComponent",
    "RewardConfig",
    "RewardPart",
    "RolloutConfig",
    "TrainerConfig",
    "UpdateConfig",
    "build_config",
    "commented_yaml",
    "config_hash",
    "describe",
    "load_config",
    "markdown",
    "run_id",
    "to_yaml",
]
