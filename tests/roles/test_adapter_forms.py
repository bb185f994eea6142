"""Every form of peft's adapters is computed, compared with its base and exported exactly, or refused when the actor is
made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import verl
from tests.conftest import byte_tokenizer
from tests.exact import norm_in_fp64
from tests.ranks import job
from verl._host import device
from verl.errors import CheckpointError, ModelError
from verl.models.loading import load_model, load_tokenizer
from verl.models.lora import adapters_off, has_adapters
from verl.models.save import check_export, save_pretrained_dir
from verl.weights.shard import checksum
from verl.weights.shards import model_shards

SIZES = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 128}
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
PROMPTS = ["Why", "Two and"]
LORA: Callable[..., Any] = lambda **options: peft.LoraConfig(  # noqa: E731
    **{"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **options}
)
ACCEPTED: dict[str, Callable[[], Any]] = {
    "lora": LORA,
    "rslora": lambda: LORA(use_rslora=True),
    "dora": lambda: LORA(use_dora=True),
    "rank_pattern": lambda: LORA(rank_pattern={"down_proj": 4}, alpha_pattern={"down_proj": 3}),
    "layers_to_transform": lambda: LORA(layers_to_transform=[1]),
    "bias=all": lambda: LORA(bias="all"),
    "bias=lora_only": lambda: LORA(bias="lora_only"),
    "modules_to_save=lm_head": lambda: LORA(modules_to_save=["lm_head"]),
    "modules_to_save=embed_tokens": lambda: LORA(modules_to_save=["embed_tokens"]),
    "modules_to_save=both": lambda: LORA(modules_to_save=["embed_tokens", "lm_head"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "lora_bias": lambda: LORA(lora_bias=True),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"]),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=["q_proj"]),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"]),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "embeddings": lambda: LORA(target_modules=["q_proj", "down_proj"], modules_to_save=["norm"]),
    "tied on purpose": lambda: LORA(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
}


def base_of(folder: Path, *, tied: bool, kind: str = "llama") -> Path:
    """The published base: a directory. Its biases are there, and are no zeros."""
    torch.manual_seed(0)
    config: Any = transformers.LlamaConfig(
        **SIZES, **HEADS, **IDS, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True
    )
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, **HEADS, **IDS, num_local_experts=3, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3) if weight.dim() > 1 else weight.add_(torch.randn_like(weight), alpha=0.1)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def plain(path: Path, dtype: str = "float64") -> Any:
    model = load_model(path, dtype=dtype)
    if dtype == "float64":
        norm_in_fp64(model)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # torch multiplies no groups of matrices in fp64
    return model


def adapted(base: Path, config: Any, dtype: str = "float64") -> Any:
    torch.manual_seed(1)
    model = plain(base, dtype)
    # peft takes apart nothing in fp64.
    if isinstance(getattr(config, "init_lora_weights", None), str) and dtype == "float64":
        return peft.get_peft_model(model.float(), config, autocast_adapter_dtype=False).double()
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def actor_of(model: Any, **options: Any) -> verl.Actor:
    sampling = {"max_new_tokens": 5, "ignore_eos": True}
    return verl.Actor(model, byte_tokenizer(), optim={"lr": 3e-2}, sampling=sampling, **options)


def train(actor: verl.Actor, steps: int = 2) -> Any:
    for step in range(steps):
        rows = actor.generate_sequences(PROMPTS, n=2, key=f"k{step}")
        actor.update(rows, [1.0, 0.0, 0.0, 1.0])
    return rows


@torch.no_grad()
def logits(model: Any) -> Tensor:
    ids = torch.tensor([[5, 9, 33, 70, 40, 81], [3, 40, 5, 200, 9, 100]])
    return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def column(batch: Any, name: str) -> Tensor:
    return batch.tensor(name)  # type: ignore[no-any-return]


def check_form(base: Path, config: Any, folder: Path) -> None:
    """Policy and reference agree at first; the reference stays the published base; both exports are the live model."""
    dtype, exact = "float64", 1e-9
    published = actor_of(plain(base, dtype))
    actor = actor_of(adapted(base, config, dtype))
    rows = actor.generate_sequences(PROMPTS, n=2, key="first")
    before = column(published.compute_log_probs(rows), "log_probs")
    policy = column(actor.compute_log_probs(rows), "log_probs")
    assert gap(policy, before) < exact
    assert gap(column(actor.compute_ref_log_probs(rows), "ref_log_probs"), policy) < exact
    train(actor)
    moved = column(actor.compute_log_probs(rows), "log_probs")
    assert gap(moved, before) > 1e-3
    assert gap(column(actor.compute_ref_log_probs(rows), "ref_log_probs"), policy) < exact
    assert torch.equal(column(actor.compute_log_probs(rows), "log_probs"), moved)
    live = logits(actor.present_model())
    actor.save_pretrained(str(folder / "merged"))
    assert gap(logits(plain(folder / "merged", dtype)), live) < exact
    # What reads the file without transformers' own check goes by the flag.
    tied = plain(folder / "merged").config.tie_word_embeddings
    with safe_open(folder / "merged" / "model.safetensors", "pt") as file:
        assert tied == ("lm_head.weight" not in file.keys())  # noqa: SIM118
    actor.save_pretrained(str(folder / "adapter"), adapter=True)
    model = peft.PeftModel.from_pretrained(plain(base, dtype), str(folder / "adapter"), autocast_adapter_dtype=False)
    assert gap(logits(model), live) < exact


QUICK = ["lora", "bias=all", "modules_to_save=embed_tokens", "ia3"]
SLOW = [form for form in ACCEPTED if form not in QUICK]


@pytest.mark.quick("lora", "ia3")
@pytest.mark.parametrize("form", QUICK)
def test_an_accepted_form_is_exact_at_every_edge(form: str, tmp_path: Path) -> None:
    check_form(base_of(tmp_path / "base", tied=QUICK.index(form) % 3 != 0), ACCEPTED[form](), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", [*ACCEPTED, *OTHERS])
def test_every_accepted_form_tied_and_untied(form: str, tied: bool, tmp_path: Path) -> None:
    check_form(base_of(tmp_path / "base", tied=tied), (ACCEPTED | OTHERS)[form](), tmp_path)


@pytest.mark.slow
def test_single_tokens_need_an_output_layer_of_its_own(tmp_path: Path) -> None:
    config = lambda: LORA(trainable_token_indices={"embed_tokens": [5, 9, 40]})  # noqa: E731
    check_form(base_of(tmp_path / "base", tied=False), config(), tmp_path)
    with pytest.raises(ModelError, match="output layer has an adapter"):
        actor_of(adapted(base_of(tmp_path / "tied", tied=True), config()))


@pytest.mark.slow
def test_stacked_experts(tmp_path: Path) -> None:
    config = LORA(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    check_form(base_of(tmp_path / "base", tied=False, kind="mixtral"), config, tmp_path)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "alora": (lambda: LORA(alora_invocation_tokens=[5]), "does not support merging"),
    "adalora": (
        lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9, init_r=2, target_r=1),
        "opened again over their base",
    ),
    "vblora": (
        lambda: peft.VBLoRAConfig(r=2, num_vectors=8, vector_length=4, topk=2, target_modules=["q_proj"]),
        r"\(VBLORA\) cannot be merged or exported",
    ),
    "poly": (lambda: peft.PolyConfig(r=2, target_modules=["q_proj"], n_tasks=2), "task_ids"),
    "lm_head": (lambda: LORA(target_modules=["lm_head"]), "output layer has an adapter"),
    "random": (lambda: LORA(init_lora_weights=False), "begin at random"),
    "pissa": (lambda: LORA(init_lora_weights="pissa"), "merge them into the model first"),
    "pissa_niter_4, bias": (lambda: LORA(init_lora_weights="pissa_niter_4", bias="all"), "merge them into the model"),
    "olora": (lambda: LORA(init_lora_weights="olora"), "merge them into the model first"),
    "fourier": (lambda: peft.FourierFTConfig(n_frequency=9, target_modules=["q_proj"]), "begin at random"),
}


def test_other_forms_are_refused_when_the_actor_is_made(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", tied=False)
    for form, (config, reason) in REFUSED.items():
        model = adapted(base, config())
        before = checksum(model_shards(model.get_base_model()))
        with pytest.raises(ModelError, match=reason):
            actor_of(model)
        assert checksum(model_shards(model.get_base_model())) == before, form


def test_adapters_that_were_trained_before_are_taken_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = base_of(tmp_path / "base", tied=True)
    actor = actor_of(adapted(base, LORA()))
    train(actor)
    actor.save_pretrained(str(tmp_path / "adapter"), adapter=True)
    assert "trained before" not in caplog.text
    again = peft.PeftModel.from_pretrained(
        plain(base), str(tmp_path / "adapter"), autocast_adapter_dtype=False, is_trainable=True
    )
    assert gap(logits(actor_of(again).model), logits(actor.model)) < 1e-9
    assert "the adapters have been trained before: the policy begins" in caplog.text


def test_a_critic_takes_and_refuses_the_same_forms(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", tied=False)
    critic = verl.Critic(adapted(base, LORA(bias="all")).get_base_model(), byte_tokenizer())
    assert has_adapters(critic.model)
    with pytest.raises(ModelError, match="does not support merging"):
        verl.Critic(adapted(base, REFUSED["alora"][0]()).get_base_model(), byte_tokenizer())


@pytest.mark.slow
def test_qlora_has_its_dequantised_base_as_reference_and_says_what_its_adapter_loses(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"dtype": "int4", "lora": {"r": 4}, "optim": {"lr": 1e-2}, "sampling": {"max_new_tokens": 6}}
    actor = verl.Actor(str(tiny), **options)
    dequantised = logits(load_model(tiny, dtype="int4"))
    rows = actor.generate_sequences(PROMPTS, n=2, key="first")
    before = column(actor.compute_log_probs(rows), "log_probs")
    assert gap(logits(actor.model), dequantised) < 1e-6
    for step in range(2):
        batch = actor.generate_sequences(PROMPTS, n=2, key=f"k{step}")
        actor.update(batch, [1.0, 0.0, 0.0, 1.0])
    assert gap(column(actor.compute_ref_log_probs(rows), "ref_log_probs"), before) < 1e-6
    assert gap(logits(actor.model), dequantised) > 1e-3
    with adapters_off(actor.model):
        assert gap(logits(actor.model), dequantised) < 1e-6
    caplog.set_level("INFO", "verl")
    actor.save_pretrained(str(tmp_path / "merged"))
    assert gap(logits(load_model(tmp_path / "merged")), logits(actor.model)) < 1e-4
    assert "merged was opened again: on a probe outputs differ by" in caplog.text
    actor.save_pretrained(str(tmp_path / "adapter"), adapter=True)
    assert "in full precision log-probs differ from those of the trained model, whose base is in int4" in caplog.text


def test_an_export_that_is_another_model_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "verl")
    model, critic = load_model(tiny), load_model(tiny, kind="value")
    for name, live in (("actor", model), ("critic", critic)):
        save_pretrained_dir(live, None, tmp_path / name)
        path = tmp_path / name / "model.safetensors"
        weights = load_file(path)
        changed = {**weights, "model.norm.weight": weights["model.norm.weight"] * -2}
        if name == "critic":
            changed["score.bias"] = weights["score.bias"] + 1
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"is not the model it was written from: on a probe outputs differ by"):
            check_export(live, tmp_path / name)
        with monkeypatch.context() as patch:
            patch.setattr(device, "free_memory", lambda _: 0)
            with pytest.raises(ModelError, match=r"'(model\.norm\.weight|score\.bias)' differs there"):
                check_export(live, tmp_path / name)
            save_pretrained_dir(live, None, tmp_path / name)  # anew
    assert "outputs, for" in caplog.text and "not compared" in caplog.text


def test_a_model_with_adapters_saves_itself_as_peft_does(tiny: Path, tmp_path: Path) -> None:
    actor = verl.Actor(str(tiny), lora={"r": 2}, optim={"lr": 1e-2})
    train(actor)
    actor.present_model().save_pretrained(tmp_path / "own")
    again = peft.PeftModel.from_pretrained(load_model(tiny), str(tmp_path / "own"))
    assert gap(logits(again), logits(actor.model)) < 1e-5
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "own").eval()
    assert gap(logits(theirs), logits(actor.model)) < 1e-5


def test_an_optimizer_of_all_parameters_trains_those_that_are_not_frozen(tmp_path: Path) -> None:
    model = adapted(base_of(tmp_path / "base", tied=False), LORA()).get_base_model()
    sampling = {"max_new_tokens": 5, "ignore_eos": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    actor = verl.Actor(model, byte_tokenizer(), optim=optimizer, sampling=sampling)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    train(actor)
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if ".lora_" in name}


def test_a_run_goes_on_against_the_reference_it_began_with(tmp_path: Path) -> None:
    """Trained biases are the base's, and those that another model begins with are others."""

    def trainer(moved: float) -> verl.Trainer:
        model = peft.get_peft_model(plain(base, "float32"), LORA(bias="all"))
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.data += moved
        return verl.Trainer(actor_of(model), None, lambda texts: [float(len(t)) for t in texts], n=2, log_dir=False)

    base = base_of(tmp_path / "base", tied=False)
    trainer(0.0).save_checkpoint(tmp_path / "saved")
    trainer(0.0).load_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="reference"):
        trainer(0.5).load_checkpoint(tmp_path / "saved")


@pytest.mark.slow
def test_references_of_ranks_that_share_a_model(tmp_path: Path) -> None:
    base_of(tmp_path, tied=False)
    done = job(2, Path(__file__).with_name("rank_adapter_forms.py"), tmp_path)
    (line,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {*line} == {"bias=all", "modules_to_save=lm_head", "ia3"}
    for form, gaps in line.items():
        assert gaps["reference"] < 1e-9 and gaps["policy"] > 1e-3, (form, gaps)


@pytest.mark.parametrize("trained", [True, False])
def test_adapters_of_a_model_with_more_tokens_than_its_base(
    tiny: Path, tmp_path: Path, trained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, size = load_model(tiny), load_model(tiny).config.vocab_size
    model.resize_token_embeddings(size + 4)
    with torch.no_grad():
        model.get_input_embeddings().weight[size:] = 5.0  # as new tokens are made from others
    kept = {"modules_to_save": ["embed_tokens", "lm_head"]} if trained else {}
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **kept)
    actor = verl.Actor(peft.get_peft_model(model, config), load_tokenizer(str(tiny)))
    if not trained:
        with pytest.raises(ModelError, match=rf"embeds {size} tokens and this model {size + 4}.*write the model whole"):
            actor.save_pretrained(tmp_path / "adapter", adapter=True)
        return
    actor.save_pretrained(tmp_path / "adapter", adapter=True)
    assert f"call resize_token_embeddings({size + 4}) on the base" in caplog.text
