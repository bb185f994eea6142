"""Modules that have moved since docs or examples named them: imported by its former name, a module is the one of today,
with a note."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

FORMER = {
    "verl.dataflow.expression": "verl.trainer.expression",
    "verl.dataflow.pipeline": "verl.trainer.pipeline",
    "verl.rollout.randomness": "verl.rollout.embedded.sampler",
    "verl.rollout.vllm_worker": "verl.rollout.vllm.worker",  # of vLLM's command line
    "verl.trainer.run": "verl.run.train",
    "verl.trainer.task_weights": "verl.tasks.weights",
}


class FormerNames(MetaPathFinder, Loader):
    """Finds the modules of `FORMER`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in FORMER else None

    def exec_module(self, module: ModuleType) -> None:
        present = FORMER[module.__name__]
        warnings.warn(f"{module.__name__} has moved: import {present}", FutureWarning, stacklevel=2)
        # The import system takes what stands here then.
        sys.modules[module.__name__] = importlib.import_module(present)
