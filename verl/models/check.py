"""A look at a model before training: what it is, whether it computes what transformers does, what it lacks
(`check_model`); and whether adapters of a caller's own can be trained, compared with their base, and exported
(`check_adapters`): tried out on the model itself, since peft has more forms than names would cover."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table
from torch.nn.functional import l1_loss
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.attention.segments import pack_rows
from verl.errors import ModelError
from verl.models import lora
from verl.models.int4 import weight_bytes
from verl.models.loading import eos_token_ids
from verl.models.outputs import outputs, probe_tokens
from verl.models.packed import PackedModel, head_of
from verl.weights.shards import on_meta

logger = logging.getLogger(__name__)

#: Bytes of weights up to which a second model is made.
_SMALL = 2 << 30
# A single token may differ by this much more than the mean.
_MOST = 10
_TEXT = "The quick brown fox jumps over the lazy dog, and 17 + 25 = 42; then all of them rest until the morning."


class ModelReport(SimpleNamespace):
    """What `check_model` found, by name. Differences are between log-probs of the packed and the plain forward;
    `device_map` has the parameters by device; `strategy` and `sharding` say that one process has all of the model."""

    def __rich__(self) -> Table:
        table = Table(title=self.name, show_header=False)
        for name, value in vars(self).items():
            if name.endswith("_difference"):
                allowed = getattr(self, name.replace("_difference", "_tolerance"))
                table.add_row(name.replace("_", " "), f"{value:.2e} (at most {allowed:.0e})")
            elif name not in ("name", "problems") and not name.endswith("_tolerance"):
                table.add_row(name.replace("_", " "), f"{value:,}" if type(value) is int else f"{value}")
        for problem in self.problems:
            table.add_row("[red]problem[/red]", problem)
        return table


def check_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ModelReport:
    """Run a few tokens through both forwards, and look at what training and generation depend on.

    Raises:
        ModelError: the model cannot be used at all.
    """
    packed = PackedModel(model)
    mean, highest = _difference(packed, tokenizer)
    head = model.get_output_embeddings()
    eos = eos_token_ids(model, tokenizer)
    # Rounding grows with depth; half precision is compared with half precision.
    allowed = {torch.float64: 1e-6, torch.float32: 1e-3}.get(packed.dtype, 0.2)
    problems: list[str] = []
    if not (mean <= allowed and highest <= _MOST * allowed):
        problems.append(
            f"packed and plain log-probs differ by {mean:.2e} on average (at most {allowed:.0e}) and by up to "
            f"{highest:.2e} (at most {_MOST * allowed:.0e})"
        )
    devices = Counter[str]()
    for parameter in model.parameters():
        devices[str(parameter.device)] += parameter.numel()
    if len(tokenizer) > packed.vocab_size:
        problems.append(f"the tokenizer has {len(tokenizer)} tokens, the model {packed.vocab_size} embeddings")
    if not eos:
        problems.append("no end-of-sequence token is known: responses end only at their longest length")
    return ModelReport(
        name=str(getattr(model, "name_or_path", "")) or type(model).__name__,
        architecture=type(model).__name__,
        parameters=devices.total(),
        dtype=str(packed.dtype).removeprefix("torch."),
        device_map=dict(devices),
        strategy="single",
        sharding="none",
        tied_head=head is not None and head.weight is model.get_input_embeddings().weight,
        max_positions=packed.max_positions,
        packed_forward=packed.supports_packed,
        mean_difference=mean,
        mean_tolerance=allowed,
        max_difference=highest,
        max_tolerance=_MOST * allowed,
        vocabulary=packed.vocab_size,
        tokenizer_size=len(tokenizer),
        eos_token_ids=list(eos),
        pad_token_id=tokenizer.pad_token_id,
        chat_template=bool(getattr(tokenizer, "chat_template", None)),
        problems=problems,
    )


@torch.no_grad()
def _difference(packed: PackedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[float, float]:
    """Mean and largest difference of log-probs between the packed forward of two rows with one prompt and
    plain forwards of each."""
    ids = [int(token) % packed.vocab_size for token in tokenizer(_TEXT)["input_ids"]]
    ids = (ids * 8)[: max(8, min(len(ids), packed.max_positions or len(ids)))]
    third = len(ids) // 3
    prompt, responses = ids[:third], [ids[third:], ids[2 * third :]]
    flat = pack_rows([prompt, prompt], responses, packed.device)
    hidden = packed.hidden(flat.tokens, flat.positions, flat.context)
    log_probs, _ = packed.log_probs(hidden.index_select(0, flat.predict), flat.targets)
    plain = []
    for response in responses:
        row = torch.tensor([prompt + response], device=packed.device)
        plain.append(outputs(packed.model, row)[0, third - 1 : -1].gather(1, row[0, third:, None])[:, 0])
    difference = (log_probs - torch.cat(plain)).abs()
    return float(difference.mean()), float(difference.max())


def check_adapters(model: Any) -> None:
    """Try a model with adapters of peft: trained weights are moved and merged, its base is computed, its layers are
    rebuilt; the weights are then as they were. Embeddings that adapters part from the output layer they were tied to
    are no longer tied, in the configuration too.

    Raises:
        ConfigError: their configuration names a layer that is not there.
        ModelError: something of it is not computed or not exact in this form of adapters.
    """
    inner = getattr(model, "backbone", model)
    (config,) = inner.peft_config.values()
    form = str(getattr(config.peft_type, "value", config.peft_type))
    lora.check_adapter_names(inner, config, "peft_config")
    # Ways to begin an adapter that take its beginning out of the base.
    if str(getattr(config, "init_lora_weights", "")).lower().startswith(("pissa", "olora", "corda", "lora_ga")):
        raise ModelError(
            f"these adapters change the base that they begin with (init_lora_weights='{config.init_lora_weights}'): "
            "merge them into the model first, and begin others"
        )
    _part_embeddings(inner)
    try:
        _try_out(model, form)
    except ModelError:
        raise
    except Exception as error:  # peft's layers may raise anything
        raise ModelError(f"adapters of this form ({form}) cannot be merged or exported: {error!r}") from error


def _try_out(model: Any, form: str) -> None:
    inner = getattr(model, "backbone", model)
    if model is inner:
        head_of(model)
    # Mean of |differences| of outputs that rounding explains.
    rounding = {torch.float64: 1e-9, torch.float32: 1e-4}.get(inner.dtype, 0.05)
    first, before = lora.reference_weights(model), outputs(model)
    with lora.adapters_off(model, first):
        base = outputs(model)
    # Of larger models the export of the adapters is compared when it is written.
    plain = lora.without_adapters(inner) if model is inner and weight_bytes(model) < _SMALL else None
    with _moved(model):
        live = outputs(model)
        exported = live if plain is None else _exported(model, plain)
        with lora.merged_forwards(model):
            merged = outputs(model)
        with lora.adapters_off(model, first):
            after = outputs(model)
    for how, result in (("merged into their layers", merged), ("opened again over their base", exported)):
        if not l1_loss(result, live) <= rounding:
            raise ModelError(
                f"adapters of this form ({form}) cannot be exported: {how}, the model's outputs differ by "
                f"{l1_loss(result, live):.3g} on average"
            )
    if not l1_loss(after, base) <= rounding:
        raise ModelError(
            f"adapters of this form ({form}) change their base: its outputs move with training, by "
            f"{l1_loss(after, base):.3g} on average, so there is no reference policy"
        )
    if not torch.isfinite(live).all() or not l1_loss(live, before) > 0:
        raise ModelError(f"adapters of this form ({form}) change nothing when their weights do")
    if not (gap := l1_loss(before, base)) <= rounding:
        (config,) = inner.peft_config.values()
        random = [key for key in ("init_lora_weights", "init_weights") if getattr(config, key, True) is False]
        if random:
            raise ModelError(
                f"adapters of this form ({form}) begin at random, with {random[0]}=False: the policy would not be its "
                "reference before the first update: set it to True"
            )
        logger.warning(
            "the adapters have been trained before: the policy begins %.3g from its reference, the base (mean of "
            "|differences| of log-probs): merge them first if they belong to the reference",
            gap,
        )
    saved = json.loads(json.dumps(lora.layer_changes(model)))
    empty = on_meta(lambda: type(inner)._from_config(inner.config, dtype=inner.dtype))
    lora.change_layers(empty, saved)
    here, there = ({name: tuple(w.shape) for name, w in m.state_dict().items()} for m in (inner, empty))
    if here != there:
        names = sorted(here.keys() ^ there.keys()) or [name for name in here if here[name] != there[name]]
        raise ModelError(f"adapters of this form ({form}) cannot be made anew from their configuration: {names[:3]}")


def _exported(model: Any, plain: Any) -> torch.Tensor:
    """Outputs of the adapters as they are exported, over their base."""
    from peft import PeftModel

    tokens = probe_tokens(model)
    with TemporaryDirectory() as folder:
        lora.save_adapter(model, folder)
        return outputs(PeftModel.from_pretrained(plain, folder, autocast_adapter_dtype=False), tokens)


@contextmanager
@torch.no_grad()
def _moved(model: Any) -> Iterator[None]:
    """Inside, the trained weights are a little elsewhere, as after training."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in trained]
    generator = torch.Generator().manual_seed(0)
    try:
        for weight in trained:
            noise = torch.randn(weight.shape, generator=generator).to(weight)
            weight.add_(noise, alpha=0.02)
        yield
    finally:
        for weight, old in zip(trained, before, strict=True):
            weight.copy_(old)


def _part_embeddings(inner: Any) -> None:
    """Give tied embeddings tensors of their own where adapters train one of them (modules_to_save)."""
    head, embeddings = inner.get_output_embeddings(), inner.get_input_embeddings()
    layers = [layer for layer in (head, embeddings) if hasattr(layer, "modules_to_save")]
    if not layers or head is None or head.weight is embeddings.weight:
        return
    output = getattr(head, "original_module", head)
    if output.weight is getattr(embeddings, "original_module", embeddings).weight:
        output.weight = torch.nn.Parameter(output.weight.detach().clone(), requires_grad=False)
    for config in (inner.config, inner.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            logger.info("adapters train one of two tied embeddings: they are two from now on")
            config.tie_word_embeddings = False
