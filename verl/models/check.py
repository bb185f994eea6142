"""A look at a model before training: what it is, whether it computes what transformers does, what it lacks."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.attention.segments import pack_rows
from verl.models.loading import eos_token_ids
from verl.models.outputs import outputs
from verl.models.packed import PackedModel

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
        parameters=sum(parameter.numel() for parameter in model.parameters()),
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
