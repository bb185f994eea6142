"""Whether the files of a model hold what the model wants: names and shapes, which are read without the weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from verl.errors import ModelError
from verl.models.heads import HEADS, Stored, ValueModel
from verl.models.lora import base_name, is_adapter
from verl.weights.shard import Shape
from verl.weights.shards import tied

#: Names that a message has room for.
_SHOWN = 6
_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module.": "checkpoint_wrapper",
    "base_model.model.": "peft",
    "pretrained_model.": "a value head of TRL",
    "module.": "DistributedDataParallel or DeepSpeed",
}


class WeightSource(NamedTuple):
    """A tensor in the files: a weight, or a block of one. transformers puts the matrices of all experts together, and
    those with the same inputs (gate and up) side by side.

    Attributes:
        expert: None: it is the whole weight.
        part, of: which of the `of` matrices that are concatenated for each expert.
    """

    key: str
    expert: int | None = None
    part: int = 0
    of: int = 1


@dataclass
class Fit:
    """How the files differ from the model.

    Attributes:
        missing: names of weights that the model has and the files lack.
        unexpected: names of tensors in the files that the model has no place for.
        reshaped: name -> shape in the files and in the model.
        retyped: name -> dtype in the files, of another kind than in the model: whole numbers for floating-point ones.
        aliases: pairs of names in the files that are one weight in the model, which ties them. Where their values
            differ transformers does not tie them, whatever the configuration says.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    retyped: dict[str, str] = field(default_factory=dict)
    aliases: list[tuple[str, str]] = field(default_factory=list)

    def check(self, where: str, model: Any, spare: Iterable[str]) -> None:
        """Raises ModelError: something differs, unexpected tensors of the names `spare` apart."""
        if self.unexpected:
            names = {*spare}
            self.unexpected = [name for name in self.unexpected if name not in names]
        if not (self.missing or self.unexpected or self.reshaped or self.retyped):
            return
        shapes = [f"{n}: {list(there)} there, {list(here)} here" for n, (there, here) in self.reshaped.items()]
        parts = [
            f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"
            for what, names in (
                ("missing, which would be random", self.missing),
                ("unexpected", self.unexpected),
                ("of another shape", shapes),
                ("of another kind of numbers", [f"{name}: {dtype}" for name, dtype in self.retyped.items()]),
            )
            if names
        ]
        kind = type(getattr(model, "backbone", model)).__name__
        raise ModelError(f"the files of {where} are not those of a {kind}, weights are {'; '.join(parts)}{self._why()}")

    def _why(self) -> str:
        """The likely reason."""
        heads = [name for name in self.unexpected if name.startswith(tuple(f"{head}." for head in HEADS))]
        if any(name.startswith(HEADS) for name in self.reshaped):
            return ". It is a classifier with several labels, which is no reward model: that has one"
        if prefix := self._prefix():
            wrapper = next((by for known, by in _WRAPPERS.items() if known in prefix), None)
            by = f", which {wrapper} adds: save the model inside the wrapper, or" if wrapper else ":"
            return f". They stand there under the prefix '{prefix}'{by} rename them"
        if heads:
            return ". They are those of a reward model or critic, which is no language model"
        if any(name.startswith(HEADS[:2]) for name in self.missing):
            return ". It is no reward model: it has no head that gives a score"
        if [name.rpartition(".")[0].rpartition(".")[2] for name in self.missing] in (["lm_head"], ["embed_out"]):
            return ". It has no output layer: it is a backbone, or its config.json lacks tie_word_embeddings"
        if self.missing and self.unexpected:
            return ". They are of another architecture than its config.json says"
        if self.retyped:
            return ". They are quantised and config.json does not say how: give the model as it was before"
        if self.missing or self.reshaped:
            return ". They are cut short, or its config.json is of another model or size"
        return ". Its config.json is of another model, or of a part of this one"

    def _prefix(self) -> str:
        """The prefix that the files have before, or in, the names of missing weights."""
        missing, prefixes = {*self.missing}, Counter[str]()
        for name in self.unexpected:
            for known in _WRAPPERS:
                if known in name and name.replace(known, "") in missing:
                    prefixes[known] += 1
            parts = name.split(".")
            for count in range(1, len(parts)):
                if ".".join(parts[count:]) in missing:
                    prefixes[".".join(parts[:count]) + "."] += 1
        return prefixes.most_common(1)[0][0] if prefixes else ""


def compare(model: nn.Module, stored: Mapping[str, Stored]) -> Fit | None:
    """How files differ from a transformers model, or a `ValueModel` up to its head; None: transformers makes other
    things of them when it loads them, so that their names do not say it.

    Tied weights may be there under any of their names.

    Args:
        model: live or without weights.
        stored: see `weight_files`.
    """
    inner: Any = getattr(model, "backbone", model)
    if getattr(inner.config, "quantization_config", None) is not None:
        return None
    weights = model_weights(model)
    try:
        sources = weight_sources(model, stored)
    except ModelError:
        return None
    fit, missing = Fit(), set[str]()
    for names in tied(weights):
        there = [name for name in names if name in sources]
        missing.update([] if there else names[:1])
        fit.aliases += [(sources[there[0]][0].key, sources[name][0].key) for name in there[1:]]
        for name in there:
            _compare_weight(fit, name, weights[name], sources[name], stored)
    strange = sources.keys() - weights.keys()
    fit.missing += sorted(name for name in missing if not _matches(name, inner._keys_to_ignore_on_load_missing))
    # An architecture's own patterns also match weights: what would be a missing one but for a prefix is not ignored.
    renamed = tuple(f".{name}" for name in fit.missing)
    # Old files hold that buffer for each layer.
    ignored = [*(inner._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    fit.unexpected += sorted(
        source.key
        for name in strange
        if name.endswith(renamed) or not _matches(name, ignored)
        for source in sources[name]
    )
    return fit


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _compare_weight(
    fit: Fit, name: str, weight: torch.Tensor, sources: list[WeightSource], stored: Mapping[str, Stored]
) -> None:
    """Note how the tensors that a weight is made of differ from it."""
    for source in sources:
        there, here = stored[source.key], tuple(weight.shape)
        if source.expert is not None:  # one expert's of a weight `[experts, of * rows, columns]`
            here = (here[1] // source.of, *here[2:])
        if there.shape != here:
            fit.reshaped[source.key] = (there.shape, here)
        # As safetensors calls plain floating-point dtypes: those of 8 bits have scales apart.
        if weight.is_floating_point() != (there.dtype in ("F64", "F32", "F16", "BF16")):
            fit.retyped[source.key] = there.dtype
    if sources[0].expert is None:
        fit.unexpected += [source.key for source in sources[1:]]  # which another name stands for already
        return
    blocks = {(source.expert, source.part): source.key for source in sources}
    experts, positions = range(weight.shape[0]), range(sources[0].of)
    fit.unexpected += [source.key for source in sources if source.expert not in experts]
    for expert in experts:
        for position in positions:
            if (expert, position) not in blocks:
                alike = next((key for (_, p), key in blocks.items() if p == position), None)
                named = None if alike is None else re.sub(r"(experts\D*)\d+", rf"\g<1>{expert}", alike)
                fit.missing.append(named or f"{name} (a part of expert {expert})")


def model_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights and persistent buffers that a model reads from its files, by their names without adapters, tied ones
    under every name."""
    state = model.state_dict(keep_vars=True)
    is_value = isinstance(model, ValueModel)
    names = [name for name in state if not (is_adapter(name) or (is_value and name.startswith("score.")))]
    return {base_name(name): state[name] for name in names}


def weight_sources(model: nn.Module, keys: Iterable[str]) -> dict[str, list[WeightSource]]:
    """The weights of a transformers model or `ValueModel` by name -> what of the tensors `keys` they are made of.
    Tensors that it has no place for are there under the name that they would have.

    Raises:
        ModelError: transformers makes other things of them when it loads the model.
    """
    inner: Any = getattr(model, "backbone", model)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # transformers 4 keeps the tensors of the files apart as they are
        return _sources_by_name(inner.base_model_prefix, model_weights(model), keys)
    changes = get_model_conversion_mapping(inner)
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    weights = model_weights(model)
    placing = (inner.base_model_prefix, weights)
    sources: dict[str, list[WeightSource]] = {}
    for key in sorted(keys, key=dot_natural_key):  # in transformers' order: some renamings go by what came before
        target, pattern = rename_source_key(key, renamings, converters, *placing)
        if target not in weights and key in weights:
            target, pattern = rename_source_key(key, [], [], *placing)
        if pattern is None:
            sources.setdefault(target, []).append(WeightSource(key))
            continue
        converter = next(c for c in converters if pattern in c.source_patterns)
        patterns = converter.source_patterns
        done = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
        if done != [("MergeModulelist", 0), ("Concatenate", 1)][: 1 + (len(patterns) > 1)]:
            raise ModelError("its weights are laid out otherwise in the files")
        number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), rename_source_key(key, renamings, [])[0])
        assert number is not None
        sources.setdefault(target, []).append(WeightSource(key, int(number[1]), patterns.index(pattern), len(patterns)))
    return sources


def _sources_by_name(prefix: str, weights: Collection[str], keys: Iterable[str]) -> dict[str, list[WeightSource]]:
    """What `weight_sources` returns where each weight is one tensor, under its name with or without `prefix`."""
    sources: dict[str, list[WeightSource]] = {}
    for key in sorted(keys):
        names = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
        sources.setdefault(next((name for name in names if name in weights), key), []).append(WeightSource(key))
    return sources
