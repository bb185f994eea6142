"""What is loaded is what the files hold: a weight that is missing, unexpected or of another shape ends by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from typer.testing import CliRunner

import verl
from tests.conftest import byte_tokenizer
from tests.properties import examples
from tests.ranks import job
from verl.cli.main import app
from verl.errors import ModelError
from verl.models.heads import ValueModel
from verl.models.loading import load_model, meta_model
from verl.models.source import ModelFiles
from verl.weights.shard import checksum
from verl.weights.shards import model_shards

Weights = dict[str, Tensor]
SIZES = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 256}
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **HEADS, **IDS),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, **HEADS, **IDS, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, **HEADS, **IDS, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=260, n_embd=16, n_layer=2, n_head=4, n_positions=256, **IDS),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, **HEADS, **IDS),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **HEADS, **IDS, num_local_experts=3),
}
CLASSIFIERS = ("llama", "gpt2", "mixtral")
KINDS = [*CONFIGS]
DAMAGES = ("dropped", "prefixed", "reshaped", "swollen", "quantised", "in 8 bits")


@lru_cache
def stored(kind: str, head: str = "lm") -> Weights:
    """What a model's files hold."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32)
    if head == "score":
        config = CONFIGS[kind]()
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: w.clone() for name, w in load_file(Path(folder, "model.safetensors")).items()}


def write(path: Path, kind: str, weights: Weights, shards: int = 1) -> Path:
    """A model directory of these weights, in one file or several."""
    path.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    config = json.loads(model.config.to_json_string(use_diff=False))
    (path / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}))
    byte_tokenizer().save_pretrained(path)
    weights = {name: weight.clone(memory_format=torch.contiguous_format) for name, weight in weights.items()}
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return path
    places = {name: f"model-{number % shards + 1:05}-of-{shards:05}.safetensors" for number, name in enumerate(weights)}
    for place in {*places.values()}:
        part = {name: weight for name, weight in weights.items() if places[name] == place}
        save_file(part, path / place, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def damaged(weights: Weights, name: str, damage: str, prefix: str = "_orig_mod.") -> Weights:
    weight = weights[name]
    if damage == "prefixed":
        return {prefix + n if n == name else n: w for n, w in weights.items()}
    changed = {
        "dropped": {},
        "reshaped": {name: weight[..., :-1]},
        "swollen": {name: torch.stack((weight, weight))},
        "quantised": {name: (100 * weight).to(torch.int8)},
        "in 8 bits": {name: weight.to(torch.float8_e4m3fn)},
    }
    return {**{n: w for n, w in weights.items() if n != name}, **changed[damage]}


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as caught:
        call()
    return str(caught.value)


def names_of(name: str) -> tuple[str, ...]:
    """What a message may call a weight of the files: a backbone has the name without its own prefix, and of one that is
    not there only the model knows a name."""
    return (name, name.partition(".")[2], name.replace("block_sparse_moe", "mlp").partition(".")[2])


def readings(path: Path, kind: str) -> dict[str, Callable[[], Any]]:
    """The ways in which a model is read: whole, and laid out for ranks that read their parts."""
    return {
        "causal": lambda: load_model(path),
        "value": lambda: load_model(path, kind="value"),
        "score": lambda: load_model(path, kind="score"),
        "causal by parts": lambda: meta_model(path, dtype="float32"),
        "value by parts": lambda: meta_model(path, dtype="float32", kind="value"),
    }


@examples(150)
@given(
    st.sampled_from(KINDS),
    st.integers(0, 1000),
    st.sampled_from(DAMAGES),
    st.sampled_from(["_orig_mod.", "base_model.model.", "module.", "model.language_model.", "x."]),
    st.integers(1, 2),
)
def test_any_weight_that_is_dropped_renamed_or_reshaped_is_named(
    kind: str, index: int, damage: str, prefix: str, shards: int
) -> None:
    weights = stored(kind)
    name = [*weights][index % len(weights)]
    with TemporaryDirectory() as folder:
        path = write(Path(folder), kind, damaged(weights, name, damage, prefix), shards)
        for how, read in readings(path, kind).items():
            if name == "lm_head.weight" and not how.startswith("causal") and damage != "prefixed":
                read()  # an output layer that nothing reads
                continue
            said = refusal(read)
            assert any(each in said for each in names_of(name)), (how, said)
            if damage == "prefixed":
                assert f"{prefix}{name}" in said, (how, said)


@examples(40)
@given(st.sampled_from(CLASSIFIERS), st.integers(0, 1000), st.sampled_from(DAMAGES))
def test_any_weight_of_a_reward_model_too(kind: str, index: int, damage: str) -> None:
    weights = stored(kind, "score")
    name = [*weights][index % len(weights)]
    with TemporaryDirectory() as folder:
        path = write(Path(folder), kind, damaged(weights, name, damage))
        said = refusal(lambda: load_model(path, kind="classifier"))
        assert any(each in said for each in names_of(name)), said


def entrances(path: Path, folder: Path) -> dict[str, Callable[[], str]]:
    """Every way a user has to a model of files, as a call that returns why it was refused."""
    good = folder / "good"
    write(good, "llama", stored("llama"))
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')

    def command(*args: Any) -> str:
        done = CliRunner().invoke(app, [*map(str, args)])
        assert done.exit_code == 1, (done.exit_code, done.output)
        return f"{done.output}{done.exception}"

    return {
        "Actor": lambda: refusal(lambda: verl.Actor(str(path))),
        "Actor, head=score": lambda: refusal(lambda: verl.Actor(str(path), head="score")),
        "Critic": lambda: refusal(lambda: verl.Critic(str(path))),
        "Reward": lambda: refusal(lambda: verl.Reward(str(path))),
        "make_reference": lambda: refusal(lambda: verl.Actor(str(good)).make_reference(str(path))),
        "verl check": lambda: command("check", path),
        "verl generate": lambda: command("generate", path, folder / "prompts.jsonl", folder / "out.jsonl"),
    }


def test_every_entrance_refuses_files_that_lack_a_weight(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    for damage in ("dropped", "prefixed"):
        path = write(tmp_path / damage, "llama", damaged(stored("llama"), name, damage))
        for entrance, call in entrances(path, tmp_path).items():
            assert name.partition(".")[2] in " ".join(call().split()), entrance
            assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
def test_the_message_says_how_many_and_what_is_likely(tmp_path: Path) -> None:
    weights = stored("llama")
    likely = {
        "prefix '_orig_mod.', which torch.compile adds": {f"_orig_mod.{name}": w for name, w in weights.items()},
        "prefix '_fsdp_wrapped_module.', which Fully": {
            name.replace("layers.0.", "layers.0._fsdp_wrapped_module."): w for name, w in weights.items()
        },
        "prefix 'policy.': rename them": {f"policy.{name}": w for name, w in weights.items()},
        "cut short, or its config.json": {name: w for name, w in weights.items() if ".layers.1." not in name},
        "no output layer": {name: w for name, w in weights.items() if name != "lm_head.weight"},
        "reward model or critic": {**stored("llama", "score")},
        "of another architecture": {**stored("gpt2")},
    }
    for number, (reason, changed) in enumerate(likely.items()):
        path = write(tmp_path / str(number), "llama", changed)
        for read in (lambda p=path: load_model(p), lambda p=path: meta_model(p, dtype="float32")):
            said = refusal(read)
            assert reason in said, said
    assert f"weights are {len(weights)} missing" in refusal(lambda: load_model(tmp_path / "0"))
    assert "is no reward model" in refusal(
        lambda: load_model(write(tmp_path / "good", "llama", weights), kind="classifier")
    )
    # More layers than the configuration has: nothing is missing.
    more = {**weights, **{n.replace(".1.", ".2."): w for n, w in weights.items() if ".layers.1." in n}}
    assert "9 unexpected" in refusal(lambda: load_model(write(tmp_path / "more", "llama", more)))


def test_an_expert_too_few_or_out_of_order_is_named(tmp_path: Path) -> None:
    weights = stored("mixtral")
    key = "model.layers.1.block_sparse_moe.experts.2."
    gone = write(tmp_path / "gone", "mixtral", {n: w for n, w in weights.items() if not n.startswith(key)})
    moved = {n.replace(key, key.replace(".2.", ".7.")): w for n, w in weights.items()}
    for path in (gone, write(tmp_path / "moved", "mixtral", moved)):
        for read in (load_model, lambda p: meta_model(p, dtype="float32")):
            assert f"{key}w1.weight" in refusal(lambda read=read, path=path: read(path))


def test_a_directory_of_adapters_is_no_model(tmp_path: Path) -> None:
    good = write(tmp_path / "good", "llama", stored("llama"))
    adapted: Any = peft.get_peft_model(load_model(good), peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    assert "holds adapters of peft" in refusal(lambda: load_model(tmp_path / "adapter"))
    adapted.save_pretrained(good)  # beside a model: transformers would load both
    assert "holds adapters of peft" in refusal(lambda: load_model(good))


def test_errors_of_transformers_are_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "mixtral", stored("mixtral"))

    def fails(*_: Any, **__: Any) -> None:
        transformers.utils.logging.get_logger("transformers.modeling_utils").warning(
            "\x1b[1mLOAD REPORT\x1b[0m\nthe line"
        )
        raise RuntimeError("first\nsecond, see the above report")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fails)
    said = refusal(lambda: load_model(path))
    assert "first\nsecond" in said and "LOAD REPORT\nthe line" in said and "\x1b" not in said


def bare(weights: Weights, prefix: str) -> Weights:
    """Under the names of a backbone that was saved alone."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items()}


def harmless() -> dict[str, tuple[str, Weights]]:
    """Files that are as good as those that transformers writes."""
    tied, gpt2 = stored("llama-tied"), stored("gpt2")
    embeddings = "model.embed_tokens.weight"
    extra = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(2) for n in range(2)}
    masks = {f"h.{n}.attn.{name}": torch.ones(1, 1, 4, 4) for n in range(2) for name in ("bias", "masked_bias")}
    return {
        "tied under both names": ("llama-tied", {**tied, "lm_head.weight": tied[embeddings]}),
        "tied under the other name": (
            "llama-tied",
            {"lm_head.weight" if name == embeddings else name: weight for name, weight in tied.items()},
        ),
        "buffers": ("llama", {**stored("llama"), **extra}),
        "masks of attention": ("gpt2", {**bare(gpt2, "transformer."), **masks}),
        "without the prefix": ("llama-tied", bare(tied, "model.")),
        "experts one by one": ("mixtral", stored("mixtral")),
        "position ids": ("gpt2", gpt2),
        "gemma": ("gemma", stored("gemma")),
        "qwen2": ("qwen2", stored("qwen2")),
    }


HARMLESS = (
    "tied under both names", "tied under the other name", "buffers", "masks of attention", "without the prefix",
    "experts one by one", "position ids", "gemma", "qwen2",
)  # fmt: skip


def test_what_is_no_fault_has_its_cases() -> None:
    assert {*HARMLESS} == harmless().keys()


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("what", HARMLESS)
@pytest.mark.parametrize("shards", [1, 2])
def test_what_is_no_fault_is_loaded_whole_and_by_parts(what: str, shards: int, tmp_path: Path) -> None:
    kind, weights = harmless()[what]
    path = write(tmp_path, kind, weights, shards)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for files in (ModelFiles(str(path), dtype="float32"), ModelFiles(str(path), "value", "float32")):
        if files.kind == "value" and what == "tied under the other name":
            assert "embed_tokens" in refusal(files.load)  # transformers' backbones read no output layer
            continue
        model = files.load()
        files.by_parts(files.on_meta())
        assert checksum(files.stream()) == checksum(model_shards(model))
        inner = model if files.kind == "causal" else model.backbone
        own = expected.base_model.state_dict() if files.kind == "value" else expected.state_dict()
        assert all(torch.equal(weight, own[name]) for name, weight in inner.state_dict().items())


def test_new_and_unused_heads_are_no_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "policy", "llama", stored("llama"))
    for kind in ("value", "score"):
        assert load_model(path, kind=kind).new_head and meta_model(path, dtype="float32", kind=kind).new_head
    scores = {**stored("llama", "score"), "lm_head.weight": stored("llama")["lm_head.weight"]}
    path = write(tmp_path / "both", "llama", scores)
    assert torch.equal(load_model(path, kind="classifier").score.weight, scores["score.weight"])
    critic = load_model(path, kind="value")
    assert isinstance(critic, ValueModel) and torch.equal(critic.score.weight, scores["score.weight"])
    meta_model(path, dtype="float32", kind="value")


def test_an_output_layer_of_its_own_is_not_tied_whatever_the_configuration_says(tmp_path: Path, caplog: Any) -> None:
    own = stored("llama")["lm_head.weight"]
    path = write(tmp_path, "llama-tied", {**stored("llama-tied"), "lm_head.weight": own})
    files = ModelFiles(str(path), dtype="float32")
    model, empty = files.load(), files.on_meta()
    assert "output layer of their own" in caplog.text
    assert torch.equal(model.lm_head.weight, own)
    assert model.config.tie_word_embeddings is empty.config.tie_word_embeddings is False
    files.by_parts(empty)
    assert checksum(files.stream()) == checksum(model_shards(model))


def on_ranks(path: Path, *names: str) -> list[dict[str, Any]]:
    write(path / "good", "llama", stored("llama"))
    done = job(2, Path(__file__).with_name("rank_files.py"), path, *names)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    references = {line["files"]: line["reference"] for line in lines if "reference" in line}
    return [{**line, "reference": references[line["files"]]} for line in lines if "refused" in line]


def test_ranks_refuse_and_take_the_same_files(tmp_path: Path) -> None:
    weights, bad = stored("llama"), {}
    for name, damage in {"model.norm.weight": "dropped", "lm_head.weight": "prefixed"}.items():
        bad[name] = write(tmp_path / damage, "llama", damaged(weights, name, damage)).name
    take_harmless(tmp_path, [item for n, item in enumerate(harmless().values()) if n in (0, 4)], bad)


@pytest.mark.slow
def test_ranks_take_all_that_is_no_fault(tmp_path: Path) -> None:
    take_harmless(tmp_path, [*harmless().values()])


def take_harmless(path: Path, good: list[tuple[str, Weights]], bad: dict[str, str] | None = None) -> None:
    bad = bad or {}
    # New heads and unused ones: a critic takes a policy, a critic and a reward model take what has both heads.
    both = {**stored("llama", "score"), "lm_head.weight": stored("llama")["lm_head.weight"]}
    folders = {f"good-{n}": item for n, item in enumerate([*good, ("llama", both)])}
    for n, (folder, (kind, content)) in enumerate(folders.items()):
        write(path / folder, kind, content, 1 + n % 2)
    lines = on_ranks(path, *bad.values(), *folders)
    # A driver goes on alone once its first role is laid out: the other ranks serve it.
    assert len(lines) == 2 * len(bad) + len(folders)
    for line in lines:
        (actor, critic, reward), reference = line["refused"], line["reference"]
        if (name := next((n for n, folder in bad.items() if folder == line["files"]), None)) is not None:
            assert all(name in text for text in (actor, critic, reward, reference)), line
        elif folders[line["files"]][1] is both:
            assert "reward model or critic" in actor and not critic and not reward, line
        else:
            assert not actor and not reference and "is no reward model" in reward, line
            assert "lm_head.weight" not in critic, line
            assert ("embed_tokens" in critic) == (folders[line["files"]] in tied_otherwise()), line
            alone = verl.Actor(str(path / line["files"])).present_model()
            assert line["checksum"] == checksum(model_shards(alone))


def tied_otherwise() -> list[tuple[str, Weights]]:
    return [harmless()["tied under the other name"]]


@pytest.mark.slow
def test_ranks_refuse_every_kind_of_damage(tmp_path: Path) -> None:
    names: dict[str, str] = {}
    for kind in KINDS:
        weights = stored(kind)
        for number, name in enumerate([*weights][:: max(1, len(weights) // 3)]):
            damage = DAMAGES[number % len(DAMAGES)]
            folder = write(tmp_path / f"{kind}-{number}", kind, damaged(weights, name, damage), 1 + number % 2).name
            names[folder] = name
    lines = on_ranks(tmp_path, *names)
    assert {line["files"] for line in lines} == {*names}
    for line in lines:
        (actor, critic, reward), reference = line["refused"], line["reference"]
        name = names[line["files"]]
        assert name in actor and name in reference, line
        assert name == "lm_head.weight" or all(name.partition(".")[2] in text for text in (critic, reward)), line


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        ("check", "dropped"),
        *(
            pytest.param(command, damage, marks=pytest.mark.slow)
            for command in ("check", "generate")
            for damage in ("dropped", "prefixed", "reshaped")
            if (command, damage) != ("check", "dropped")
        ),
    ],
)
def test_commands_on_ranks_refuse_files_that_lack_a_weight(command: str, damage: str, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = write(tmp_path / "bad", "llama", damaged(stored("llama"), name, damage))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    files = [tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"] if command == "generate" else []
    done = job(2, "-m", "verl", command, path, *files, check=False)
    assert done.returncode and name in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out.jsonl").exists()
