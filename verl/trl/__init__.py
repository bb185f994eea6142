"""TRL's names over this package's trainer: a script of TRL's runs with its import line changed.

    from verl.trl import GRPOConfig, GRPOTrainer

A trainer here maps TRL's arguments onto an `Actor`, a `Trainer` and a loader, and holds them: `actor`, `trainer`,
`loader`. `docs/from_trl.md` lists what differs. Names and defaults are TRL 1.16's.

Reading order: `trainers`, `online`, `offline`, `arguments`, `data`, `losses`, `optim`, `entries`, `events`, `peft`,
`scripts`, `rewards`, `names`.
"""

from verl.trl.arguments import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig
from verl.trl.offline import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
from verl.trl.online import GRPOTrainer, RLOOTrainer
from verl.trl.peft import get_kbit_device_map, get_peft_config, get_quantization_config
from verl.trl.scripts import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser, get_dataset

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
