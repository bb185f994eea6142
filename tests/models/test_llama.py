"""The fused layers of Llama-shaped models against the same models' own modules, in values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from verl.attention.segments import pack_rows
from verl.kernels.compiled import Kernels, kernels
from verl.models.packed import PackedModel

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
SHAPED: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-tied-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=32, sliding_window=4)),
}
PROMPTS, RESPONSES = [[5, 17, 3], [5, 17, 3], [9, 8]], [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]


def made(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = SHAPED[name]()
    for key, parameter in model.named_parameters():
        if "norm" in key or "bias" in key:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in key else 0.0, 0.3)
    return model.to(dtype)


def gradients(packed: PackedModel, fused: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of a packed batch, and the gradient of a weighted sum of them."""
    flat = pack_rows(PROMPTS, RESPONSES, device=packed.device)
    kept, packed.fused = packed.fused, packed.fused if fused else None
    packed.model.zero_grad()
    hidden = packed.hidden(flat.tokens, flat.positions, flat.context).index_select(0, flat.predict)
    log_probs, _ = packed.log_probs(hidden, flat.targets)
    (log_probs * torch.linspace(-1, 2, len(log_probs), dtype=log_probs.dtype)).sum().backward()
    packed.fused = kept
    found = {name: p.grad.double().clone() for name, p in packed.model.named_parameters() if p.grad is not None}
    return log_probs.detach().double(), found


@pytest.mark.parametrize("name", SHAPED)
def test_fp32_gradients_are_those_of_the_models_own_modules(name: str) -> None:
    packed = PackedModel(made(name, torch.float32))
    assert packed.fused is not None
    got, got_gradients = gradients(packed, fused=True)
    want, want_gradients = gradients(packed, fused=False)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    assert got_gradients.keys() == want_gradients.keys()
    scale = max(float(g.norm()) for g in want_gradients.values())
    for key, gradient in want_gradients.items():
        assert (got_gradients[key] - gradient).norm() <= 3e-6 * gradient.norm() + 1e-7 * scale, key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPED)
def test_the_forward_without_a_gradient_rounds_as_the_one_with(name: str, dtype: torch.dtype) -> None:
    packed = PackedModel(made(name, dtype))
    flat = pack_rows(PROMPTS, RESPONSES)
    forward = packed.choose_forward()
    assert packed.fused is not None and forward != packed.packed_hidden
    want = packed.hidden(flat.tokens, flat.positions, flat.context)
    assert want.requires_grad
    with torch.no_grad():
        assert torch.equal(forward(flat.tokens, flat.positions, flat.context), want)
    packed.backbone.layers[0].mlp.down_proj.register_forward_hook(lambda *_: None)  # type: ignore[union-attr,index]
    assert packed.choose_forward() == packed.packed_hidden


def test_bf16_gradients_are_as_near_to_exact_ones_as_the_models_own_are() -> None:
    packed = PackedModel(made("qwen2", torch.bfloat16))
    assert packed.fused is not None
    exact = PackedModel(made("qwen2", torch.bfloat16).double())
    _, want = gradients(exact, fused=False)

    def error(fused: bool) -> float:
        _, found = gradients(packed, fused)
        return sum(float((found[key] - want[key]).square().sum()) for key in want) ** 0.5

    assert error(fused=True) <= 1.2 * error(fused=False)


def test_the_backward_keeps_less_than_half_of_what_autograd_would() -> None:
    packed = PackedModel(made("llama", torch.bfloat16))

    def kept(fused: bool) -> int:
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            kept_alive.append(tensor)
            return tensor

        kept_alive: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            gradients(packed, fused)
        return sum(sizes.values())

    assert kept(fused=True) < 0.5 * kept(fused=False)


def test_frozen_weights_get_no_gradient_and_change_no_other() -> None:
    packed = PackedModel(made("llama", torch.float32))
    _, every = gradients(packed, fused=True)
    for key, parameter in packed.model.named_parameters():
        parameter.requires_grad_("q_proj" in key or "layernorm" in key)
    _, some = gradients(packed, fused=True)
    assert some and all("q_proj" in key or "layernorm" in key for key in some)
    assert all(torch.equal(every[key], gradient) for key, gradient in some.items())


def test_gradient_checkpointing_changes_no_number() -> None:
    packed = PackedModel(made("llama", torch.float32))
    plain = gradients(packed, fused=True)[1]
    packed.model.gradient_checkpointing_enable({"use_reentrant": False})
    packed.model.train()
    again = gradients(packed, fused=True)[1]
    assert all(torch.equal(plain[key], again[key]) for key in plain)


def test_other_shapes_dtypes_and_hooked_layers_keep_their_own_modules() -> None:
    torch.manual_seed(0)
    assert PackedModel(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32))).fused is None  # it norms its heads
    assert PackedModel(made("llama", torch.float64)).fused is None
    packed = PackedModel(made("llama", torch.float32))
    calls: list[int] = []
    packed.backbone.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))  # type: ignore[union-attr,index]
    gradients(packed, fused=True)
    assert calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 700])
def test_norm_backward(dtype: torch.dtype, rows: int) -> None:
    x, weight, grad = (torch.randn(shape).to(dtype) for shape in ((rows, 192), (192,), (rows, 192)))
    before = torch.randn(rows, 192).to(dtype)
    states, scale = x.double().requires_grad_(), weight.double().requires_grad_()
    out = scale * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-5)
    out.backward(grad.double())
    to_x, to_weight, again = before.clone(), torch.zeros(192), torch.empty_like(x)
    _kernels(dtype).rms_norm_backward(x, weight, grad, to_x, again, to_weight, *x.shape, 1e-5)
    tolerance = {"rtol": 2e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(to_x.double(), before.double() + states.grad, **tolerance)
    torch.testing.assert_close(again.double(), out.detach(), **tolerance)
    wide = {"rtol": 2e-2, "atol": 0.3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(to_weight.double(), scale.grad, **wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gated_product_backward(dtype: torch.dtype) -> None:
    gate, up, grad = (torch.randn(300, 160).mul_(3).to(dtype) for _ in range(3))
    g, u = gate.double().requires_grad_(), up.double().requires_grad_()
    product = torch.nn.functional.silu(g) * u
    product.backward(grad.double())
    to_gate, to_up, place = torch.empty_like(gate), torch.empty_like(up), grad.clone()
    _kernels(dtype).silu_mul_backward(gate, up, place, to_gate, to_up, gate.numel())
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for got, want in ((place, product.detach()), (to_gate, g.grad), (to_up, u.grad)):
        torch.testing.assert_close(got.double(), want, **tolerance)


def _kernels(dtype: torch.dtype) -> Kernels:
    found = kernels(dtype, torch.device("cpu"))
    assert found is not None, "the kernels must build where the tests run"
    return found


def test_fused_kernels_are_a_choice(caplog: pytest.LogCaptureFixture) -> None:
    model = made("llama", torch.float32).eval()
    plain = PackedModel(model, fused_kernels=False)
    assert plain.fused is None
    expected = gradients(plain, fused=False)[0]
    assert not caplog.records
    for wanted in (True, "compiled", "xformers"):
        packed = PackedModel(model, fused_kernels=wanted)
        assert packed.fused is not None
        assert torch.allclose(gradients(packed, fused=True)[0], expected, atol=1e-4)
    (record,) = caplog.records
    assert (
        "no 'xformers' kernels for LlamaForCausalLM (torch.float32 on cpu): 'compiled' ones run" in record.getMessage()
    )
    caplog.clear()
    PackedModel(made("llama", torch.float64), fused_kernels="compiled")
    assert "no 'compiled' kernels for LlamaForCausalLM (torch.float64 on cpu): the model's own code" in caplog.text


def test_a_layer_that_computes_otherwise_keeps_its_own_modules() -> None:
    # Llama's modules by name: no rotation in every second layer, halves that are neighbours, a factor of what is added.
    others = {
        "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SIZES, no_rope_layer_interval=2, pad_token_id=0)),
        "helium": lambda: HeliumForCausalLM(HeliumConfig(**SIZES, head_dim=32, pad_token_id=0)),
        "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, residual_multiplier=0.9)),
    }
    for name, make in others.items():
        torch.manual_seed(0)
        packed = PackedModel(make().bfloat16())
        assert packed.supports_packed, name
        assert packed.fused is None, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_a_model_does_at_long_positions_alone_is_seen(dtype: torch.dtype) -> None:
    def made_with(original: int) -> PackedModel:
        rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
        rope["original_max_position_embeddings"] = original
        return PackedModel(
            Ministral3ForCausalLM(Ministral3Config(**SIZES, head_dim=32, rope_parameters=rope)).to(dtype)
        )

    assert made_with(16).fused is None  # from there on queries are scaled
    assert made_with(64).fused is not None


class Adapted(torch.nn.Embedding):
    """An embedding with an adapter that begins at zero."""

    def __init__(self, base: torch.nn.Embedding) -> None:
        super().__init__(base.num_embeddings, base.embedding_dim)
        self.weight = base.weight
        self.adapter = torch.nn.Parameter(torch.zeros(base.embedding_dim))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.adapter


def test_adapters_that_are_still_zero_are_trained() -> None:
    model = made("llama", torch.float32)
    model.model.embed_tokens = Adapted(model.model.embed_tokens)
    _, found = gradients(PackedModel(model), fused=True)
    assert found["model.embed_tokens.adapter"].norm() > 0
    model = made("llama", torch.float32)
    model.model.layers[1].mlp.gate_proj.scale = torch.nn.Parameter(torch.ones(()))  # nobody knows what reads it
    assert PackedModel(model).fused is None
