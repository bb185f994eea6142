"""Where a model comes from: files that each process reads for itself, or a live model that travels to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from safetensors import safe_open

from verl.errors import ModelError
from verl.models.blank import sample
from verl.models.heads import ValueModel, read_head, score_model, weight_files
from verl.models.loading import blank_model, load_model, resolved_dtype
from verl.models.options import Dtype, ModelOptions
from verl.models.portable import PortableModel
from verl.models.shards import model_shards, named_weights
from verl.shard import Shard

Kind = Literal["causal", "value", "score"]


@dataclass(frozen=True)
class ModelFiles:
    """A model by directory or hub name, as `load_model` takes it."""

    path: str
    kind: Kind = "causal"
    dtype: Dtype = "auto"
    trust_remote_code: bool = False

    @classmethod
    def of(cls, options: ModelOptions, kind: Kind) -> ModelFiles:
        """Those of settings that name a path; a directory is found from any working directory."""
        path = str(options.path)
        path = os.path.abspath(path) if os.path.isdir(path) else path
        return cls(path, kind, options.dtype, options.trust_remote_code)

    def load(self) -> Any:
        """The model, whole.

        Raises:
            ModelError: see `load_model`.
        """
        model = load_model(self.path, dtype=self.dtype, kind=self.kind, trust_remote_code=self.trust_remote_code)
        return score_model(model) if self.kind == "score" else model

    def blank(self, device: torch.device | str = "cpu") -> Any:
        """The model without weights, see `verl.models.blank`.

        Raises:
            ModelError: nothing is there, or it is no model.
        """
        dtype = resolved_dtype(self.path, self.dtype, trust_remote_code=self.trust_remote_code) or "float32"
        trust = self.trust_remote_code
        model = blank_model(self.path, device, dtype=dtype, kind=self.kind, trust_remote_code=trust)
        return score_model(model) if self.kind == "score" else model

    def why_whole(self, model: Any) -> str | None:
        """Why the weights of a blank `model` cannot be read from the files one by one; None: they can."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        backbone = getattr(model, "backbone", model)
        if resolved_dtype(self.path, self.dtype, trust_remote_code=self.trust_remote_code) is None:
            return "their dtype is known when they are read"
        if any(getattr(backbone, name, None) for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")):
            return "some of its layers are kept in float32"
        if any(isinstance(change, WeightConverter) for change in get_model_conversion_mapping(backbone)):
            return "its weights are laid out otherwise in the files"
        try:
            sample(backbone)
            files = weight_files(self.path)
        except (ModelError, OSError, ValueError, TypeError) as error:
            return str(error)
        for name, weight in named_weights(model):
            if name.startswith("score.") and isinstance(model, ValueModel):
                continue
            if name not in files:
                return f"the files have no '{name}'"
            with safe_open(files[name], framework="pt") as file:
                if tuple(file.get_slice(name).get_shape()) != tuple(weight.shape):
                    return f"'{name}' has another shape in the files"
        return None

    def plan(self, model: Any) -> dict[str, tuple[str, torch.dtype]]:
        """Of the weights of a blank model, tied ones under every name: the name in the files, and the dtype."""
        stored: dict[int, str] = {}
        named = model.state_dict(keep_vars=True).items()
        return {name: (stored.setdefault(id(weight), name), weight.dtype) for name, weight in named}

    def shards(self, model: Any, plan: Mapping[str, tuple[str, torch.dtype]]) -> Iterator[Shard]:
        """The weights of `model` (a blank one, or what is here of it once it is laid out) from the files: views of
        these where the dtype is theirs, so that reading a part touches no more.

        Args:
            plan: of the blank model.
        """
        files, opened = weight_files(self.path), {}
        head = dict(self._head(model)) if isinstance(model, ValueModel) else {}
        for name, _ in named_weights(model):
            if name in head:
                yield Shard.whole(name, head[name])
                continue
            stored, dtype = plan[name]
            path = files[stored]
            if path not in opened:
                opened[path] = safe_open(path, framework="pt")
            yield Shard.whole(name, opened[path].get_tensor(stored).to(dtype))

    def stream(self) -> Iterator[Shard]:
        """All weights, in the dtype of the model, one at a time where the files allow it."""
        model = self.blank()
        if self.why_whole(model) is not None:
            return model_shards(self.load())
        return self.shards(model, self.plan(model))

    def _head(self, model: ValueModel) -> Iterator[tuple[str, torch.Tensor]]:
        """The head's weights in the files, or those of a new one."""
        found = dict(zip(("weight", "bias"), read_head(self.path) or (None, None), strict=True))
        for name, weight in model.score.named_parameters():
            given = found[name]
            yield f"score.{name}", torch.zeros(weight.shape, dtype=weight.dtype) if given is None else given


ModelSource: TypeAlias = PortableModel | ModelFiles
