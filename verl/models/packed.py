"""A transformers causal LM seen as a function: flat tokens in, final hidden states out.

All tokens of a micro-batch (training) or of a step of generation (rollout) form one flat row `[T]`. An
`AttentionContext` determines what each token attends to; it reaches the attention function through the keyword
arguments that transformers passes down. A comparison with the model's own forward finds models that cannot be called
so (soft-capped attention scores, sinks, chunked windows, no attention interface). These run over padded rows behind
the same interface. The number and size of heads are read from the layers' calls, not from the configuration.

Rotary embeddings whose frequencies depend on the longest position of the call ("dynamic", "longrope") see the
longest row of the micro-batch, as in a padded batch.

Legend: T flat tokens, d hidden size, V vocabulary, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from verl._base.autograd import take_rows
from verl._host.device import limit_library_memory
from verl.attention.segments import pack_rows
from verl.errors import ModelError
from verl.models.llama import AttentionRecorder, FusedLayers, has_llama_shape, is_close
from verl.models.log_probs import token_log_probs
from verl.weights.layout import count_of
from verl.weights.shards import named_weights, sample, stacks_of

logger = logging.getLogger(__name__)

_IMPLEMENTATION = "verl"
# What model code passes to its attention function without asking for another formula.
_HARMLESS = frozenset(
    {
        "cache_position",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class AttentionContext(Protocol):
    """Knows, for one forward, what each flat token attends to."""

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """The attention output `[T, H, D]` of this forward's flat tokens.

        `window`: a token sees itself and the `window - 1` before it; None: all before it.
        """


class _UnsupportedError(ModelError):
    """The model asks its attention function for something that a packed forward does not compute."""


class PackedModel:
    """A transformers causal LM (or a bare backbone) as flat tokens in, final hidden states out.

    The model stays usable as before: outside a packed call its attention is SDPA. Nothing is copied.

    Args:
        fused_kernels: run the layers by fused kernels where they are available; a name asks for the kernels of that
            library, and others are taken with a warning. Ours are "compiled", for Llama-shaped models on CPU.
        device: where it computes; None: where its weights are. Weights may come later (`on_meta`), or stay in host
            memory.

    Raises:
        ModelError: it is no transformers model with a text configuration, its head is not a linear map (with the
            known scales and soft caps) of the final hidden states, or has adapters.
    """

    def __init__(
        self, model: PreTrainedModel, *, fused_kernels: bool | str = True, device: torch.device | str | None = None
    ) -> None:
        self.model = model
        self.fused_kernels = bool(fused_kernels)
        self._device = None if device is None else torch.device(device)
        if not isinstance(getattr(model, "base_model", None), nn.Module) or not hasattr(model, "config"):
            raise ModelError(f"{type(model).__name__} is not a transformers model: it has no config or no backbone")
        if hasattr(model, "get_base_model"):
            raise ModelError("the model is wrapped by peft: give its get_base_model(), in which the adapters are")
        compute_experts(model)
        if self.device.type == "cpu":
            limit_library_memory()
        self.backbone: nn.Module = backbone_of(self.model)
        self.config = self.model.config.get_text_config()
        self.num_layers = int(self.config.num_hidden_layers)
        self.num_heads = count_of(self.config, "num_attention_heads") or 1  # state-space models have none
        self.num_kv_heads = count_of(self.config, "num_key_value_heads") or self.num_heads
        self.hidden_size = int(self.config.hidden_size)
        self.head_dim = count_of(self.config, "head_dim") or self.hidden_size // self.num_heads
        self.vocab_size = int(self.config.vocab_size)
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None) or None
        #: Rows of a table of learned positions: a longer row has no forward. None: there is no such table.
        self.position_table: int | None = None
        self._softcap, self._scale = _logit_formulas(self.model)[0]
        #: Fused layers, where they were found to compute the same as the model's own code.
        self.fused: FusedLayers | None = None
        #: Process group of the ranks that share the model by tensor parallelism, once it is cut (see `measure_heads`).
        self.tensor_group: Any = None
        #: Waits for the weight of a name, while weights are on their way; None: all are there.
        self.ready: Callable[[str], object] | None = None
        #: Whether a KV cache of `num_kv_heads` and `head_dim` fits: one call a layer, and all of one shape.
        self.supports_paged = False
        self.supports_packed = self._enable()
        if isinstance(fused_kernels, str):
            self._warn_without(fused_kernels)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device if self._device is None else self._device

    def hidden(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Final hidden states (after the last norm) `[T, d]` of flat tokens `[T]` at `positions` `[T]`.

        Raises:
            ModelError: the model has no packed forward and the context cannot lay its tokens out as rows.
        """
        return self.choose_forward()(tokens, positions, context)

    def choose_forward(self) -> Callable[[Tensor, Tensor, AttentionContext], Tensor]:
        """The forward of `hidden` for the modules as they are: fused layers, or the model's own code. It may be kept as
        long as the modules are not replaced or hooked: their weights may change and move."""
        # Not settled once for all: a user may add adapters, FSDP its hooks, autocast another dtype. Fused layers read
        # weights by name, and would skip whatever was put around them.
        fused = self.fused if self.ready is None and not torch.is_autocast_enabled(self.device.type) else None
        if fused is not None and has_llama_shape(self.backbone, self.head_dim):
            return fused.hidden
        return self.packed_hidden if self.supports_packed else lambda tokens, _, rows: self.padded_hidden(tokens, rows)

    def compile_layers(self) -> None:
        """Compile the layers of the model's own code, in place, instead of fused ones. Layers of one kind share their
        graphs. Attention is left out: it is a kernel already, and depends on the context."""
        AttentionInterface.register(_IMPLEMENTATION, torch.compiler.disable(_attention))
        self.fused = None
        for stack in stacks_of(self.backbone, self.num_layers)[:1]:
            for layer in stack:
                layer.compile(dynamic=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[N, V]` of hidden states `[N, d]`, in fp32 (fp64 for an fp64 model)."""
        weight, bias = head_of(self.model)
        if hasattr(weight, "placements"):  # ranks have rows of it: the module gathers their logits
            logits: Tensor = self.model.get_output_embeddings()(hidden)
        else:
            logits = nn.functional.linear(hidden, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def log_probs(self, hidden: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """`token_log_probs(**options)` of `targets` `[N]` under this model's head, given hidden states `[N, d]`."""
        weight, bias = head_of(self.model)
        options |= {"bias": bias, "scale": self._scale, "softcap": self._softcap}
        return token_log_probs(hidden, weight, targets, **options)

    def packed_hidden(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """`hidden` by the model's own code."""
        # Model code leaves a 4-D mask as it is, so none of its own is built.
        no_mask = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=tokens.device)
        with nullcontext() if self.ready is None else self._weights_arriving(self.ready):
            rows = {"input_ids": tokens[None], "position_ids": positions[None], "attention_mask": no_mask}
            output = self.backbone(**rows, use_cache=False, packed=context)
        return cast(Tensor, output[0][0])

    @contextmanager
    def _weights_arriving(self, ready: Callable[[str], object]) -> Iterator[None]:
        """Inside, each part of the model waits for its own weights before it computes; afterwards all are there."""
        # The first forward after a transfer has begun overlaps with it: a layer waits for its own weights, while those
        # of later layers are on their way. After that forward all are there, so that no later one looks.
        self.ready = None
        names = {id(weight): name for name, weight in named_weights(self.model)}

        def wait(module: nn.Module, _: Any = None) -> None:
            for weight in (*module.parameters(), *module.buffers()):
                if id(weight) in names:
                    ready(names[id(weight)])

        with ExitStack() as hooks:
            for part in _parts(self.backbone, self.num_layers):
                hooks.enter_context(part.register_forward_pre_hook(wait))
            yield
        wait(self.model)

    def padded_hidden(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """`hidden` by the model's own forward over padded rows, of a context that can lay its tokens out so."""
        if not hasattr(context, "padded_rows"):
            raise ModelError(
                f"{type(self.model).__name__} has no packed forward (its attention is not one of ours): "
                "generate with the 'hf' rollout engine"
            )
        rows = context.padded_rows()
        ids = tokens[rows.source]
        # Padding stands on the right, where causality hides it. Masking it too would leave rows without any
        # visible key under a sliding window, and these are NaN.
        output = self.backbone(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return take_rows(output[0].flatten(0, 1), rows.copy_index)

    def _enable(self) -> bool:
        """Switch the model to our attention; keep it if the packed forward agrees with the model's own."""
        # Tried out, not looked up: neither a class nor a configuration says what a model does with positions, masks and
        # windows, and a list of classes would be wrong for the next one.
        if self.device.type == "meta":
            raise ModelError("the model is on the meta device: load its weights first")
        if self.model.device.type == "meta":
            return self._enable_by_sample()
        with evaluating(self.model), torch.no_grad():
            flat = pack_rows(*_PROBE, device=self.device, keep_last=True)
            tokens = flat.tokens % self.vocab_size
            rows = flat.context.padded_rows()
            reference = self._plain_hidden()
            if self.model._can_set_attn_implementation() and (windows := _window_layers(self.config)) is not None:
                previous = self.model.config._attn_implementation
                AttentionInterface.register(_IMPLEMENTATION, _attention)
                AttentionMaskInterface.register(_IMPLEMENTATION, sdpa_mask)
                self.model.set_attn_implementation(_IMPLEMENTATION)
                probe = AttentionRecorder(flat.context)
                with suppress(_UnsupportedError):  # a layer asks for attention that we do not compute
                    hidden = self.packed_hidden(tokens, flat.positions, probe)
                    every = sorted(probe.calls) == list(range(self.num_layers))
                    as_named = every and windows == sum(window is not None for _, window in probe.calls.values())
                    if as_named and is_close(hidden[rows.source][rows.mask], reference):
                        self._take_shape(probe)
                        if self.fused_kernels:
                            self.fused = FusedLayers.of(self, probe.calls, tokens, flat, hidden)
                        return True
                self.model.set_attn_implementation(previous)
            hidden = self.padded_hidden(tokens, flat.context)
            # Parts of an fp64 model may compute in fp32 (a softmax, a rotation); what looks ahead differs by far more.
            hidden = hidden[rows.source][rows.mask]
            if not is_close(hidden, reference) and not is_close(hidden, reference, 1e-5):
                raise ModelError(
                    f"{type(self.model).__name__} is not causal: hidden states depend on later tokens or on other "
                    "rows, so no log-prob or value of a token is defined"
                )
            return False

    def _enable_by_sample(self) -> bool:
        """`_enable` of a model without weights, by a small one that computes as it does."""
        probed = PackedModel(sample(self.model, self.device), fused_kernels=False)
        for name in ("num_heads", "num_kv_heads", "head_dim", "hidden_size", "position_table", "supports_paged"):
            setattr(self, name, getattr(probed, name))
        self._softcap, self._scale = probed._softcap, probed._scale
        if probed.supports_packed:
            self.model.set_attn_implementation(_IMPLEMENTATION)
        return probed.supports_packed

    @torch.no_grad()
    def measure_heads(self) -> None:
        """Heads as the layers of this rank have them, after the model was cut over ranks, all of which call this."""
        flat = pack_rows(*_PROBE, device=self.device, keep_last=True)
        probe = AttentionRecorder(flat.context)
        with evaluating(self.model):
            self.packed_hidden(flat.tokens % self.vocab_size, flat.positions, probe)
        self._take_shape(probe)

    def _take_shape(self, probe: AttentionRecorder) -> None:
        """Number and size of heads as the layers have them: latent attention differs from its configuration."""
        shapes = {(q.shape[1], *k.shape[1:]) for q, k in zip(probe.inputs[::3], probe.inputs[1::3], strict=True)}
        if len(shapes) == 1:
            ((self.num_heads, self.num_kv_heads, self.head_dim),) = shapes
            once = sorted(probe.layers) == list(range(self.num_layers))
            self.supports_paged = once and self.num_heads % self.num_kv_heads == 0

    def _warn_without(self, kernels: str) -> None:
        """Warn if other code runs instead of the requested fused kernels."""
        if self.fused is None or kernels != "compiled":
            logger.warning(
                "this build has no '%s' kernels for %s (%s on %s): %s",
                *(kernels, type(self.model).__name__, self.dtype, self.device.type),
                "the model's own code runs" if self.fused is None else "'compiled' ones run in their place",
            )

    def _plain_hidden(self) -> Tensor:
        """Hidden states of the probe by the model's own forward; its logits check our head."""
        hidden = []
        for prompt, response in zip(*_PROBE, strict=True):
            ids = torch.tensor([prompt + response], device=self.device) % self.vocab_size
            with _PositionTable() as table:
                table.length = ids.shape[1]
                hidden.append(self.backbone(input_ids=ids, use_cache=False)[0][0])
        self.position_table, self.hidden_size = table.size, hidden[0].shape[-1]
        if not torch.cat(hidden).isfinite().all():
            raise ModelError(f"the hidden states of {type(self.model).__name__} are not finite: weights are damaged")
        if self.model.get_output_embeddings() is not None:
            self._choose_logit_formula(hidden[-1], self.model(input_ids=ids, use_cache=False).logits[0])
        return torch.cat(hidden)

    def _choose_logit_formula(self, hidden: Tensor, logits: Tensor) -> None:
        """Take the formula under which `hidden` `[N, d]` gives the model's own `logits` `[N, V]`."""
        if head_of(self.model)[0].shape[1] == self.hidden_size:
            for formula in _logit_formulas(self.model):
                self._softcap, self._scale = formula
                if is_close(self.logits(hidden), logits):
                    return
        raise ModelError(
            f"the logits of {type(self.model).__name__} are not a linear map of its final hidden states, nor one with "
            "a scale or soft cap that its configuration names: this architecture is not supported"
        )


# Two rows that share a prompt, and one of its own: prompts, responses.
_PROBE = (
    [[5, 17, 3, 29, 11], [5, 17, 3, 29, 11], [23, 2, 13]],
    [[19, 7, 31], [43, 37], [41, 47, 53, 6]],
)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function given to transformers: `[1, H, T, D]` of a packed call; SDPA for any other call.

    Stays valid when gradient checkpointing runs a layer again in the backward, since nothing is switched on
    and off.
    """
    if packed is None:
        kwargs |= {"dropout": dropout, "scaling": scaling}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _HARMLESS]
    if unknown or dropout or kwargs.get("is_causal") is False or query.shape[-1] != value.shape[-1]:
        raise _UnsupportedError(
            f"layer {module.layer_idx} asks for attention that a packed forward does not compute "
            f"({', '.join(unknown) or 'dropout, no causality, or values of another size than keys'}): "
            "set its dropout to 0, or wrap the model in PackedModel again after changing it"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed.attend(int(cast(int, module.layer_idx)), q_THD, k_TKD, v_TKD, scale, sliding_window)[None], None


class _PositionTable(TorchFunctionMode):
    """Sees whether a forward of `length` tokens looks their positions up in a table; `size`: how many it has."""

    length = 0
    size: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding and len(args) > 1 and args[0].numel() == self.length:
            rows, table = args[0].flatten().tolist(), args[1]
            # Some begin their table with rows for padding.
            if self.length > 1 and rows == list(range(rows[0], rows[0] + self.length)):
                self.size = int(table.shape[0]) - rows[0]
        return func(*args, **(kwargs or {}))


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """A transformers model without its language-model head.

    Raises:
        ModelError: it has a head, and its backbone is not found.
    """
    backbone = model.base_model
    if backbone is model and model.get_output_embeddings() is not None:
        # Some classes name their backbone otherwise than their prefix says.
        backbone = getattr(model, "model", model)
        if backbone is model:
            raise ModelError(f"the backbone of {type(model).__name__} is not found: this architecture is not supported")
    return backbone


def _parts(module: nn.Module, layers: int) -> Iterator[nn.Module]:
    """The modules of a backbone that are called one after the other: its layers, the embedding, the last norm."""
    for child in module.children():
        stacks = stacks_of(child, layers)
        if child in stacks:
            yield from child.children()
        elif stacks:
            yield from _parts(child, layers)
        else:
            yield child


def head_of(model: Any) -> tuple[Tensor, Tensor | None]:
    """The output weight `[V, d]` of a causal LM and its bias `[V]`, if any.

    Raises:
        ModelError: the model is a backbone without an output head, or the head has something else to train.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no language-model head: load it as a causal LM")
    weight, bias = cast(Tensor, head.weight), cast("Tensor | None", getattr(head, "bias", None))
    whole = hasattr(head, "modules_to_save")  # trained as it is, beside the one of the base
    if not whole and any(p.requires_grad and p is not weight and p is not bias for p in head.parameters()):
        raise ModelError(
            "the output layer has an adapter (LoRA on lm_head, or on an embedding tied to it), which would never "
            "be trained: leave it out of the adapter's target modules, or train it whole (modules_to_save)"
        )
    return weight, bias


def compute_experts(model: Any) -> None:
    """Let an fp64 model compute its experts one by one: grouped products have no fp64."""
    if model.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode inside, in its own mode after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# How configurations name a soft cap, a factor, and a number that most architectures divide by, and some multiply with.
_LOGIT_SETTINGS = (
    ("final_logit_softcapping", "logits_soft_cap", "softcap"),
    ("logit_scale", "lm_head_multiplier", "output_multiplier"),
    ("logits_scaling",),
)


def _logit_formulas(model: PreTrainedModel) -> list[tuple[float | None, float]]:
    """Soft caps and factors between output layer and logits that the configuration may mean."""
    config = model.config.get_text_config()
    values = ([getattr(config, name, None) for name in names] for names in _LOGIT_SETTINGS)
    softcap, scale, by = (next((float(v) for v in of if isinstance(v, int | float) and v), None) for of in values)
    return [(softcap, (scale or 1.0) / (by or 1.0)), (softcap, (scale or 1.0) * (by or 1.0))]


def _window_layers(config: Any) -> int | None:
    """How many layers must ask for a sliding window, by the configuration; None: it has layers of other kinds."""
    kinds = list(getattr(config, "layer_types", None) or ())
    if not kinds:
        return int(config.num_hidden_layers) if getattr(config, "sliding_window", None) else 0
    return kinds.count("sliding_attention") if {*kinds} <= {"full_attention", "sliding_attention"} else None
