"""Where a model comes from: files that each process reads for itself, or a live model that travels to it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from verl._base.durable import digest
from verl.errors import ModelError
from verl.models.fit import WeightSource, model_weights, weight_sources
from verl.models.heads import ValueModel, read_head, score_model, weight_files
from verl.models.loading import load_model, meta_model, resolved_dtype
from verl.models.lora import add_lora, base_name, first_adapters, is_adapter
from verl.models.options import Dtype, LoraOptions, ModelOptions
from verl.models.portable import PortableModel
from verl.weights.shard import Shard
from verl.weights.shards import model_shards, named_weights, no_forks, sample, tied, whole_weights

Kind = Literal["causal", "value", "score"]


@dataclass(frozen=True)
class ModelFiles:
    """A model by directory or hub name, as `load_model` takes it.

    Attributes:
        lora: adapters that it is given.
        seed: of their random half.
        positions: as of `load_model`.
    """

    path: str
    kind: Kind = "causal"
    dtype: Dtype = "auto"
    trust_remote_code: bool = False
    lora: LoraOptions | None = None
    seed: int = 0
    positions: int | None = None

    @classmethod
    def of(cls, options: ModelOptions, kind: Kind, seed: int = 0) -> ModelFiles:
        """The files that settings name; a directory is made absolute, to be found from any working directory."""
        path = str(options.path)
        path = os.path.abspath(path) if os.path.isdir(path) else path
        return cls(
            path, kind, options.dtype, options.trust_remote_code, options.lora, seed, options.max_position_embeddings
        )

    def load(self) -> Any:
        """The model, whole.

        Raises:
            ModelError: see `load_model`.
            ConfigError: see `add_lora`.
        """
        return self._made(load_model, self.dtype)

    def on_meta(self, device: torch.device | str = "cpu") -> Any:
        """The model without weights, see `verl.weights.shards`.

        Raises:
            ModelError: nothing is there, or it is no model.
            ConfigError: see `add_lora`.
        """
        dtype = resolved_dtype(self.path, self.dtype, trust_remote_code=self.trust_remote_code) or "float32"
        return self._made(partial(meta_model, device=device), dtype)

    def _made(self, make: Callable[..., Any], dtype: str) -> Any:
        """The model with the head and the adapters that it is to have."""
        options = {"kind": self.kind, "trust_remote_code": self.trust_remote_code, "positions": self.positions}
        model = make(self.path, dtype=dtype, **options)
        model = score_model(model) if self.kind == "score" else model
        if self.lora is not None:
            add_lora(model, self.lora, self.seed)
        no_forks[model] = lambda model: model.parameters()
        return model

    def by_parts(self, model: Any) -> Callable[[Any], Iterator[Shard]]:
        """A function that reads the weights of `model`, which is on the meta device, one by one: those that are here of
        it, once it is laid out.

        Raises:
            ModelError: says why they cannot be read so.
        """
        backbone = getattr(model, "backbone", model)
        if resolved_dtype(self.path, self.dtype, trust_remote_code=self.trust_remote_code) is None:
            raise ModelError("their dtype is known when they are read")
        if any(getattr(backbone, name, None) for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")):
            raise ModelError("some of its layers are kept in float32")
        try:
            sample(backbone)
            sources = weight_sources(model, weight_files(self.path))
        except (OSError, SafetensorError, ValueError, TypeError) as error:  # `ModelError` among them
            raise ModelError(str(error)) from error
        stored: dict[str, list[WeightSource]] = {}  # tied ones under every name
        for names in tied(model_weights(model)):
            there = next((name for name in names if name in sources), None)
            if there is None:
                raise ModelError(f"the files have no '{names[0]}'")
            stored |= dict.fromkeys(names, sources[there])
        plan: dict[str, tuple[torch.Tensor, Sequence[WeightSource]]] = {}
        for name, weight in model.state_dict(keep_vars=True).items():
            if is_adapter(name) or base_name(name) in stored:
                of_name = () if is_adapter(name) else stored[base_name(name)]
                plan[name] = torch.empty_like(weight, device="meta"), of_name
        return partial(self._shards, plan)

    def _shards(self, plan: Mapping[str, tuple[torch.Tensor, Sequence[WeightSource]]], model: Any) -> Iterator[Shard]:
        """From the files: views of these where the dtype is theirs, so that reading a part touches no more."""
        files, opened = weight_files(self.path), cache(partial(safe_open, framework="pt"))
        head: dict[str, torch.Tensor] = {}
        if isinstance(model, ValueModel):  # in the files, or a new one
            stored = read_head(self.path) or (None, None)
            for (name, new), saved in zip(model.score.named_parameters(), stored, strict=False):
                head[f"score.{name}"] = torch.zeros(new.shape, dtype=new.dtype) if saved is None else saved
        # One after the other, in the order of the whole model: ranks that have a part of them draw the same numbers.
        adapters = first_adapters({name: tuple(weight.shape) for name, (weight, _) in plan.items()}, self.seed)
        for name, _ in named_weights(model):
            if name in head:
                yield Shard.whole(name, head[name])
                continue
            weight, sources = plan[name]
            if is_adapter(name):
                tensor = next(tensor for drawn, tensor in adapters if drawn == name)
                yield Shard.whole(name, tensor.to(weight.dtype))
            for source in sources:
                tensor = opened(files[source.key].path).get_tensor(source.key).to(weight.dtype)
                if source.expert is None:
                    yield Shard.whole(name, tensor)
                    continue
                offset = (source.expert, source.part * len(tensor), *(0,) * (tensor.dim() - 1))
                yield Shard(name, tuple(weight.shape), offset, tensor[None])

    @cached_property
    def digest(self) -> str | None:
        """SHA-256 over the files of the weights; None: they are no safetensors."""
        try:
            paths = sorted({file.path for file in weight_files(self.path).values()}, key=os.path.basename)
        except (OSError, SafetensorError):
            return None
        sha = hashlib.sha256()
        for path in paths:
            with open(path, "rb") as file:
                sha.update(bytes.fromhex(digest(file.fileno())))
        return sha.hexdigest()

    def stream(self) -> Iterator[Shard]:
        """All weights, in the dtype of the model, one at a time where the files allow it."""
        model = self.on_meta()
        try:
            read = self.by_parts(model)
        except ModelError:
            return model_shards(self.load())
        return whole_weights(read(model))


ModelSource: TypeAlias = PortableModel | ModelFiles
