"""Settings of a run: the schema, reading YAML with `key=value` overrides, and the identity of a run.

Reading order: `schema`, `tasks`, `identity`, `load`, `document`, `name_rules`, `other_names`, `sft_names`,
`unused_names`, `translation`.
"""

from verl.config.document import commented_yaml, describe, differences, markdown
from verl.config.identity import config_hash, run_id
from verl.config.load import build_config, load_config, load_tasks, to_yaml
from verl.config.schema import Config, CostConfig, CriticConfig, RewardConfig, RewardPart
from verl.config.tasks import TaskConfig

__all__ = [
    "Config", "CostConfig", "CriticConfig", "RewardConfig", "RewardPart", "TaskConfig", "build_config",
    "commented_yaml", "config_hash", "describe", "differences", "load_config", "load_tasks", "markdown", "run_id",
    "to_yaml",
]  # fmt: skip
