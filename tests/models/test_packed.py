"""The packed forward against transformers' own, row by row, in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    GPTJConfig,
    Llama4TextConfig,
    OPTConfig,
    PreTrainedModel,
    RemBertConfig,
)

from verl.attention.segments import Packed, pack_rows
from verl.errors import DataError, ModelError
from verl.models.heads import ValueModel
from verl.models.packed import PackedModel, head_of

Make = Callable[..., PreTrainedModel]

# Ragged rows: shared prompts, empty and one-token responses, a one-token prompt, a repeated prompt that is
# not adjacent, a group with one feeding row.
PROMPTS = [[5, 6, 7, 8, 9, 10]] * 4 + [[11]] * 2 + [[12, 13, 14]] + [[15, 16]] * 3 + [[5, 6, 7, 8, 9, 10]]
RESPONSES = [[3, 4, 5], [6], [], [7, 8, 9, 10, 11, 12, 13, 3, 2], [20, 21], [22, 23, 24, 2], [30, 31, 32, 33]]
RESPONSES += [[], [40, 41, 2], [42], [50, 51, 52]]
OTHER = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def log_probs(packed: PackedModel, flat: Packed) -> Tensor:
    hidden = packed.hidden(flat.tokens, flat.positions, flat.context)
    return packed.log_probs(hidden.index_select(0, flat.predict), flat.targets)[0]


def plain_log_probs(model: PreTrainedModel, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
    rows = []
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0].log_softmax(-1)
        picked = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(response, dtype=torch.int64)[:, None])
        rows.append(picked[:, 0])
    return torch.cat(rows)


def gradients(model: PreTrainedModel, values: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, len(values), dtype=values.dtype)
    found = torch.autograd.grad((values * weights).sum(), list(model.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.quick(every=3)
def test_log_probs_and_gradients_equal_a_plain_forward(model: PreTrainedModel) -> None:
    expected = plain_log_probs(model, PROMPTS, RESPONSES)
    expected_gradient = gradients(model, expected)
    packed = PackedModel(model)
    assert packed.supports_packed == (model.config.model_type not in ("gemma2", "recurrent_gemma", "bloom"))
    assert (model.config._attn_implementation == "verl") == packed.supports_packed
    # Eager attention takes its softmax in fp32, and recurrent gemma its recurrence.
    in_fp64 = model.config._attn_implementation != "eager" and model.config.model_type != "recurrent_gemma"
    tolerance = 1e-10 if in_fp64 else 1e-6
    for share in (True, False):
        flat = pack_rows(PROMPTS, RESPONSES, share_prompts=share)
        values = log_probs(packed, flat)
        assert (values - expected).abs().max() < tolerance
        assert difference(gradients(model, values), expected_gradient) < tolerance


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma2"])
def test_gradient_checkpointing_changes_nothing(make_model: Make, kind: str) -> None:
    options = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if kind == "gpt2" else {}
    model = make_model(kind, **options)
    packed = PackedModel(model)
    flat = pack_rows(PROMPTS, RESPONSES)
    expected = gradients(model, log_probs(packed, flat))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    assert difference(gradients(model, log_probs(packed, flat)), expected) < 1e-12


def test_sharing_feeds_each_prompt_once_and_no_last_token() -> None:
    flat = pack_rows([[5, 6, 7]] * 4, [[1, 2, 3]] * 4)
    assert len(flat.tokens) == 3 + 4 * 2
    assert len(pack_rows([[5, 6, 7]] * 4, [[1, 2, 3]] * 4, share_prompts=False).tokens) == 4 * (3 + 2)
    assert len(pack_rows([[5, 6, 7]] * 4, [[1, 2, 3]] * 4, keep_last=True).tokens) == 3 + 4 * 3


@pytest.mark.parametrize("share", [True, False])
def test_layout_indices(share: bool) -> None:
    flat = pack_rows(PROMPTS, RESPONSES, share_prompts=share, keep_last=True)
    assert flat.targets.tolist() == [token for response in RESPONSES for token in response]
    rows = flat.context.padded_rows()
    for source, mask, prompt, response in zip(rows.source, rows.mask, PROMPTS, RESPONSES, strict=True):
        assert flat.tokens[source[mask]].tolist() == prompt + response
        assert flat.positions[source[mask]].tolist() == list(range(len(prompt + response)))
    ends = [(prompt + response)[-1] for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    assert flat.tokens[flat.last].tolist() == ends


def test_equal_rows(llama: PreTrainedModel) -> None:
    prompts, responses = [[5, 6]] * 3, [[7, 8, 9]] * 3
    values = log_probs(PackedModel(llama), pack_rows(prompts, responses))
    assert (values - plain_log_probs(llama, prompts, responses)).abs().max() < 1e-12


def test_rows_without_any_response(llama: PreTrainedModel) -> None:
    flat = pack_rows([[5, 6], [5, 6], [7]], [[], None, []])
    assert log_probs(PackedModel(llama), flat).shape == (0,)


def test_empty_prompts_and_empty_batches_are_refused() -> None:
    with pytest.raises(DataError, match="row 1 has an empty prompt"):
        pack_rows([[1], []], [[2], [3]])
    with pytest.raises(DataError, match="without rows"):
        pack_rows([], [])


def test_bf16_stays_near_fp32(make_model: Make) -> None:
    exact = plain_log_probs(make_model("llama", torch.float32), PROMPTS, RESPONSES)
    model = make_model("llama", torch.bfloat16)
    values = log_probs(PackedModel(model), pack_rows(PROMPTS, RESPONSES))
    assert values.dtype == torch.float32
    assert (values - exact).abs().mean() < 0.1
    assert gradients(model, values).isfinite().all()


def test_the_model_generates_as_before(model: PreTrainedModel) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    untouched = copy.deepcopy(model)
    PackedModel(model)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), untouched.generate(ids, **options))
    found, expected = model(ids, attention_mask=mask).logits, untouched(ids, attention_mask=mask).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, equal_nan=True)
    assert "verl" not in model.config.to_json_string()


def test_logits_are_those_of_the_model(model: PreTrainedModel) -> None:
    packed = PackedModel(model)
    flat = pack_rows([[5, 6, 7, 8]], [[]])
    hidden = packed.hidden(flat.tokens, flat.positions, flat.context)
    assert (packed.logits(hidden) - model(input_ids=flat.tokens[None]).logits[0]).abs().max() < 1e-12


def test_modules_keep_their_modes(llama: PreTrainedModel) -> None:
    llama.train()
    llama.model.layers[0].eval()
    PackedModel(llama)
    assert llama.training
    assert not llama.model.layers[0].training


def test_a_bare_backbone_has_hidden_states_and_no_head(llama: PreTrainedModel) -> None:
    packed = PackedModel(llama.model)
    assert packed.supports_packed
    flat = pack_rows([[5, 6, 7]], [[]])
    expected = llama.model(flat.tokens[None]).last_hidden_state[0]
    assert (packed.hidden(flat.tokens, flat.positions, flat.context) - expected).abs().max() < 1e-12
    with pytest.raises(ModelError, match="no language-model head"):
        head_of(packed.model)


def test_a_model_that_looks_ahead_is_refused() -> None:
    config = BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    with pytest.raises(ModelError, match="later tokens"):
        PackedModel(AutoModel.from_config(config).eval())


def test_attention_dropout_in_training_is_an_error_in_plain_words(make_model: Make) -> None:
    model = make_model("llama", attention_dropout=0.5)
    packed = PackedModel(model)
    model.train()
    flat = pack_rows([[5, 6, 7]], [[1]])
    with pytest.raises(ModelError, match="dropout"):
        packed.hidden(flat.tokens, flat.positions, flat.context)


def test_damaged_weights_are_told(llama: PreTrainedModel) -> None:
    with torch.no_grad():
        llama.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        PackedModel(llama)


class AdaptedHead(torch.nn.Linear):
    """An output layer with an adapter that begins at zero."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, dtype=base.weight.dtype)
        self.weight = base.weight
        self.adapter = torch.nn.Parameter(torch.zeros(base.out_features, dtype=base.weight.dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.adapter


def test_an_adapter_of_the_output_layer_is_refused(llama: PreTrainedModel) -> None:
    llama.lm_head = AdaptedHead(llama.lm_head)
    with pytest.raises(ModelError, match="never be trained"):
        PackedModel(llama)
    llama.lm_head.adapter.requires_grad_(False)  # nothing is lost
    assert PackedModel(llama).supports_packed


def test_hidden_states_have_the_width_that_is_seen() -> None:
    sizes = {name: size for name, size in OTHER.items() if name != "intermediate_size"}
    config = OPTConfig(**sizes, word_embed_proj_dim=16, ffn_dim=48, max_position_embeddings=20)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    packed = PackedModel(model)
    assert packed.hidden_size == 16
    assert packed.position_table == 20
    flat = pack_rows(PROMPTS, RESPONSES)
    assert (log_probs(packed, flat) - plain_log_probs(model, PROMPTS, RESPONSES)).abs().max() < 1e-10
    critic = ValueModel.from_model(model)
    assert critic.score.weight.shape == (1, 16)
    assert critic.score(packed.hidden(flat.tokens, flat.positions, flat.context)).shape == flat.tokens.shape


def test_a_backbone_of_another_name_than_the_class_says_is_found() -> None:
    config = Llama4TextConfig(**OTHER, num_key_value_heads=2, head_dim=8, intermediate_size_mlp=48, pad_token_id=0)
    config.moe_layers = []
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    assert model.base_model is model
    values = log_probs(PackedModel(model), pack_rows(PROMPTS, RESPONSES))
    assert (values - plain_log_probs(model, PROMPTS, RESPONSES)).abs().max() < 1e-5
    assert ValueModel.from_model(model).backbone is model.model


def test_a_head_of_several_layers_is_refused() -> None:
    config = RemBertConfig(**OTHER, is_decoder=True, input_embedding_size=16, output_embedding_size=24)
    with pytest.raises(ModelError, match="not a linear map"):
        PackedModel(AutoModelForCausalLM.from_config(config).eval())


def test_a_softmax_in_fp32_is_not_taken_for_a_look_ahead() -> None:
    config = GPTJConfig(vocab_size=61, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_positions=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    values = log_probs(PackedModel(model), pack_rows(PROMPTS, RESPONSES))
    assert (values - plain_log_probs(model, PROMPTS, RESPONSES)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_each_layer_waits_for_its_own_weights(make_model: Make, kind: str) -> None:
    model = make_model(kind)
    packed, flat = PackedModel(model), pack_rows(PROMPTS, RESPONSES, share_prompts=True)
    expected = log_probs(packed, flat)
    there = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    events: list[str] = []

    def ready(name: str) -> None:
        if name not in events:
            events.append(name)
            with torch.no_grad():
                model.get_parameter(name).copy_(there[name])

    class Noted:
        def attend(self, layer: int, *given: Any) -> Tensor:
            events.append(f"attention {layer}")
            return flat.context.attend(layer, *given)

    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    packed.ready = ready
    hidden = packed.hidden(flat.tokens, flat.positions, cast(Any, Noted()))
    found = packed.log_probs(hidden.index_select(0, flat.predict), flat.targets)[0]
    assert difference(found, expected) < 1e-10
    assert set(there) <= set(events) and packed.ready is None
    stack = "h" if kind == "gpt2" else "layers"
    first = [next(i for i, name in enumerate(events) if f".{stack}.{layer}." in name) for layer in range(2)]
    assert first[0] < events.index("attention 0") < first[1] < events.index("attention 1")
    assert difference(log_probs(packed, flat), expected) < 1e-10
