"""Models with one number for each token or sequence: critics and reward models.

Shapes: N positions, d hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Container
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from verl.errors import ModelError
from verl.models.packed import backbone_of, compute_experts, evaluating

#: Names that scalar heads have in checkpoints: sequence and token classifiers, and common value models.
HEADS = ("score", "classifier", "value_head", "v_head.summary", "v_head")
#: In a model's config: its score is that of the EOS after a reply, as reward models are trained here.
SCORE_AT_EOS = "score_at_eos"


class ValueModel(nn.Module):
    """A backbone and a linear head: a value a position, or a score a sequence (the number at its last token).

    The head is fp64 over an fp64 backbone, else fp32. A new head is zero:
    the first values are 0 and nothing random is drawn. Weights are named as in a transformers token
    classifier with one label (`model.layers...`, `score.weight`, `score.bias`), so checkpoints load
    there too, but for classes that call their head otherwise (GPT-2, GPT-NeoX, Falcon: `classifier`).

    Args:
        backbone: a transformers model without a head; its tensors are used as they are, not copied.
        head: weight `[1, d]` and bias `[1]`, if there are any.
    """

    def __init__(self, backbone: PreTrainedModel, head: tuple[Tensor, Tensor | None] | None = None) -> None:
        super().__init__()
        self.prefix = backbone.base_model_prefix
        # The name that the architecture gives its backbone is the prefix of all weight names.
        # (Not by `add_module`, which takes no name that a property has.)
        self._modules[self.prefix] = backbone
        self.config: Any = backbone.config
        self.name_or_path = str(backbone.name_or_path)
        size = width_of(backbone)
        dtype = torch.float64 if backbone.dtype == torch.float64 else torch.float32
        self.score = _Head(size, 1, bias=head is None or head[1] is not None, dtype=dtype, device=backbone.device)
        self.new_head = head is None
        if head is not None and tuple(head[0].shape) != (1, size):
            raise ModelError(
                f"the head of this checkpoint has shape {list(head[0].shape)}, one number a position needs "
                f"[1, {size}]: a classifier with several labels is no value or reward model"
            )
        with torch.no_grad():
            for parameter, saved in zip((self.score.weight, self.score.bias), head or (None, None), strict=True):
                if parameter is not None:
                    parameter.copy_(saved) if saved is not None else parameter.zero_()

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> ValueModel:
        """Over the live backbone of a causal LM, of a bare backbone, or of a classifier with one label (and
        its head)."""
        backbone = cast(PreTrainedModel, backbone_of(model))
        if hasattr(model, "peft_config"):
            backbone.peft_config = model.peft_config
        for name in HEADS[:2]:
            head = _trained_head(getattr(model, name, None))
            if isinstance(head, nn.Linear) and head.out_features == 1:
                return cls(backbone, (head.weight.detach(), getattr(head.bias, "data", None)))
        return cls(backbone)

    @property
    def backbone(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self._modules[self.prefix])


def score_model(model: Any) -> Any:
    """A model under a score head: its own, or a new one, without a bias as a sequence classifier has it."""
    scored = model if isinstance(model, ValueModel) else ValueModel.from_model(model)
    setattr(scored.config, SCORE_AT_EOS, True)
    if not scored.new_head:
        return scored
    return ValueModel(scored.backbone, (torch.zeros_like(scored.score.weight), None))


def as_classifier(model: ValueModel) -> Any:
    """The sequence classifier of transformers over the same weights.

    Raises:
        ValueError: transformers has no classifier of its architecture.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config)
    setattr(classifier, classifier.base_model_prefix, model.backbone)
    share_head(model, classifier)
    return classifier.eval()


def share_head(model: ValueModel, classifier: Any) -> None:
    """Let a classifier use the head of a model over its backbone, trained or frozen as before."""
    shared = _Column(model.score.in_features, 1, bias=model.score.bias is not None, device="meta")
    shared.weight, shared.bias = model.score.weight, model.score.bias
    name = next(name for name in HEADS[:2] if hasattr(classifier, name))
    head = getattr(classifier, name)
    shared.requires_grad_(_trained_head(head).weight.requires_grad)
    if hasattr(head, "modules_to_save"):
        head.modules_to_save[head.active_adapter] = shared
    else:
        setattr(classifier, name, shared)


def _trained_head(head: Any) -> Any:
    """The copy of a head that peft trains, if it does, else the head."""
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapter]


@torch.no_grad()
def width_of(backbone: PreTrainedModel) -> int:
    """The width of final hidden states, which some models have narrower than `hidden_size` says."""
    if backbone.device.type == "meta":
        return int(backbone.config.get_text_config().hidden_size)
    compute_experts(backbone)
    token = torch.zeros(1, 1, dtype=torch.int64, device=backbone.device)
    with evaluating(backbone):
        return int(backbone(input_ids=token, use_cache=False)[0].shape[-1])


class _Head(nn.Linear):
    """A number `[N]` for each of final hidden states `[N, d]`, in the dtype of the head."""

    def forward(self, hidden: Tensor) -> Tensor:
        # A sum of products instead of a matrix product: autocast leaves it in full precision.
        values = (hidden.to(self.weight.dtype) * self.weight[0]).sum(-1)
        bias = cast("Tensor | None", self.bias)
        return values if bias is None else values + bias


class _Column(nn.Linear):
    """A head as classifiers have it."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.to(self.weight.dtype))


class Stored(NamedTuple):
    """A tensor in the files: the safetensors file that holds it, its shape, and its dtype as safetensors calls it."""

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> Tensor:
        with safe_open(self.path, framework="pt") as weights:
            return cast(Tensor, weights.get_tensor(self.name))


def read_head(name: str) -> tuple[Tensor, Tensor | None] | None:
    """The scalar head stored in a checkpoint directory or hub model: weight and bias, or None.

    Raises:
        OSError: the checkpoint has no safetensors weights.
    """
    files = weight_files(name)
    tensors = [files[key].read() for key in head_names(files)]
    return (tensors[0], tensors[1] if len(tensors) > 1 else None) if tensors else None


def head_names(names: Container[str]) -> list[str]:
    """The names of a scalar head's weight, and of its bias if it has one, among those in the files; none: no head."""
    head = next((head for head in HEADS if f"{head}.weight" in names), None)
    return [] if head is None else [name for name in (f"{head}.weight", f"{head}.bias") if name in names]


def weight_files(name: str) -> dict[str, Stored]:
    """The tensors of a checkpoint directory or hub model by their names there. Read from the files' own headers: an
    index may be of other files.

    Raises:
        OSError: there are no weights, or a file is missing.
        SafetensorError: one is damaged.
    """
    files = [cached_file(name, "model.safetensors", _raise_exceptions_for_missing_entries=False)]
    if files[0] is None:  # transformers, too, looks for an index only where there is no single file
        files, _ = get_checkpoint_shard_files(name, cached_file(name, "model.safetensors.index.json"))
    stored: dict[str, Stored] = {}
    for path in map(str, files):
        with safe_open(path, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118
                tensor = weights.get_slice(key)
                stored[key] = Stored(key, path, tuple(tensor.get_shape()), tensor.get_dtype())
    return stored
