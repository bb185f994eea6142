"""TRL's names over this package's trainer: a script of TRL's runs with its import line changed.

    from verl.trl import GRPOConfig, GRPOTrainer

A trainer here maps TRL's arguments onto an `Actor`, a `Trainer` and a loader, and holds them: `actor`, `trainer`,
`loader`. `docs/from_trl.md` lists what differs. The names and defaults are those of TRL 1.16.

Reading order: `trainers`, `online`, `arguments`, `data`, `losses`, `optim`, `entries`, `events`, `attributes`, `peft`,
`scripts`, `mixtures`, `rewards`, `names`.
"""

from verl.trl.arguments import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig
from verl.trl.mixtures import DatasetMixtureConfig, get_dataset
from verl.trl.online import GRPOTrainer, RLOOTrainer
from verl.trl.peft import get_kbit_device_map, get_peft_config, get_quantization_config
from verl.trl.scripts import ModelConfig, ScriptArguments, TrlParser
from verl.trl.trainers import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "DatasetMixtureConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "ModelConfig",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "ScriptArguments",
    "TrlParser",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]
