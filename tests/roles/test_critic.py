"""The critic's calls, and values across tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import verl
import verl.data.alignment
from tests.conftest import byte_tokenizer
from tests.roles.test_cells import MODELS
from verl.algorithms import make_algorithm
from verl.data.alignment import CharacterAlignment
from verl.data.text import ResponseText
from verl.errors import ConfigError

TEXTS = ["Once upon a time", "naïve café – déjà vu", "日本語と😀 emoji", "", "a"]


def sequences_of(texts: list[str]) -> verl.Batch:
    tokenizer = byte_tokenizer()
    return verl.Batch.from_columns(
        {
            "id": [str(i) for i in range(len(texts))],
            "prompt_tokens": [tokenizer("Say: ")["input_ids"]] * len(texts),
            "response_tokens": [tokenizer(text)["input_ids"] + [0] for text in texts],
        }
    )


def test_the_same_tokenizer_on_both_sides_changes_nothing() -> None:
    sequences = sequences_of(TEXTS)
    alignment = CharacterAlignment(byte_tokenizer(), byte_tokenizer())
    there = alignment.batch(sequences)
    assert there["prompt_tokens"] == sequences["prompt_tokens"]
    # Where a character is several tokens, all have the number of the first.
    numbers = [[float(len(text.encode()[:j].decode(errors="ignore"))) for j in range(len(text.encode()) + 1)]
               for text in TEXTS]  # fmt: skip
    assert alignment.to_actor(sequences, numbers) == numbers
    indices = [[float(j) for j in range(len(row))] for row in numbers]
    firsts = [[float(row.index(number)) for number in row] for row in numbers]
    assert alignment.to_actor(sequences, indices) == firsts


def test_a_token_begins_with_its_space_whatever_the_offsets_say() -> None:
    # Byte-level tokenizers leave the space out of a token's offsets, unless they are told to keep it.
    merges = (("Ġ", "u"), ("Ġu", "p"), ("Ġ", "Ġ"))
    actor, critic = byte_tokenizer(merges), byte_tokenizer(merges)
    critic.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokens = actor("Once up  a up")["input_ids"]
    assert critic("Once up", return_offsets_mapping=True)["offset_mapping"][-1] == (5, 7)
    sequences = sequences_of([""]).drop(["response_tokens"]).add({"response_tokens": [tokens]})
    alignment = CharacterAlignment(actor, critic)
    numbers = [[float(i) for i in range(len(tokens))]]
    assert alignment.to_actor(sequences, numbers) == numbers
    assert alignment.to_critic(sequences.add({"returns": numbers}), ("returns",))["returns"] == numbers


def test_values_are_carried_by_character() -> None:
    # The critic reads "ab" as one token: both of the actor's tokens have its value.
    critic = byte_tokenizer((("a", "b"),))
    sequences = sequences_of(["abcab"])
    alignment = CharacterAlignment(byte_tokenizer(), critic)
    there = alignment.batch(sequences)
    assert len(there["response_tokens"][0]) == 4  # ab c ab <|end|>
    assert alignment.to_actor(sequences, [[1.0, 2.0, 3.0, 4.0]]) == [[1.0, 1.0, 2.0, 3.0, 3.0, 4.0]]
    marked = sequences.add({"returns": [[10.0, 11.0, 12.0, 13.0, 14.0, 15.0]], "response_mask": [[1] * 6]})
    carried = alignment.to_critic(marked, ("returns",))
    assert carried["returns"] == [[10.0, 12.0, 13.0, 15.0]]
    assert carried["response_mask"] == [[1, 1, 1, 1]]
    rejected = alignment.to_critic(marked.add({"loss_mask": [[1, 1, 0, 0, 0, 1]]}), ("returns",))
    assert rejected["loss_mask"] == [[1, 0, 0, 1]]
    assert make_algorithm("ppo").token_weights(rejected).tolist() == [0.5, 0.0, 0.0, 0.5]


def test_every_token_gets_a_value_whatever_the_text() -> None:
    sequences = sequences_of(TEXTS)
    alignment = CharacterAlignment(byte_tokenizer(), byte_tokenizer((("a", "b"), ("o", "n"))))
    there = alignment.batch(sequences)
    values = [[1.0] * len(row) for row in there["response_tokens"]]
    found = alignment.to_actor(sequences, values)
    assert [len(row) for row in found] == sequences.lengths("response_tokens")


@pytest.mark.quick("qwen2")
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_a_critic_of_another_architecture_and_tokenizer_learns(
    tiny: Path, make_tiny: Callable[..., Path], kind: str, tmp_path: Path
) -> None:
    path = make_tiny(kind)
    byte_tokenizer((("a", "b"), ("t", "h"))).save_pretrained(path)
    actor = verl.Actor(str(tiny), sampling=verl.SamplingParams(max_new_tokens=6))
    critic = verl.Critic.from_pretrained(str(path), optim={"lr": 1e-2})
    sequences = actor.generate_sequences(["Once upon"], n=4)
    assert critic.compute_values(sequences).lengths("values") == sequences.lengths("response_tokens")
    losses = [critic.update(sequences, [2.0, 2.0, 2.0, 2.0])["loss"] for _ in range(30)]
    assert losses[-1] < losses[0] / 2
    values = critic.compute_values(sequences).tensor("values")
    assert float((values - 2.0).abs().mean()) < 1.0


def test_values_start_at_zero_and_only_the_critic_moves(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), sampling=verl.SamplingParams(max_new_tokens=4))
    critic = verl.Critic(str(tiny), optim={"lr": 1e-2})
    sequences = actor.generate_sequences(["Once upon"], n=2)
    assert torch.count_nonzero(critic.compute_values(sequences).tensor("values")) == 0
    before = actor.compute_log_probs(sequences)["log_probs"]
    critic.update(sequences, [1.0, 0.0])
    assert torch.count_nonzero(critic.compute_values(sequences).tensor("values")) > 0
    assert actor.compute_log_probs(sequences)["log_probs"] == before


def test_starts_in_pieces_are_those_of_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer((("a", "b"), ("o", "n")))
    alignment = CharacterAlignment(tokenizer, tokenizer)
    tokens = tokenizer("naïve 日本語😀 ab on \ufffd " * 12)["input_ids"]
    spans = alignment._spans(tokens)
    monkeypatch.setattr(verl.data.alignment, "_WINDOW", len(tokens))
    assert alignment._spans(tokens) == spans


def test_sequences_of_an_unknown_tokenizer_are_refused(tiny: Path) -> None:
    """The actor's ids would be read as other letters, and values would be of texts that nobody wrote."""
    actor = verl.Actor(str(tiny), sampling={"max_new_tokens": 6})
    known = actor.generate_sequences(["Once", "upon"])
    sequences = known.drop(["tokenizer"])
    spelt = json.loads(actor.tokenizer.backend_tokenizer.to_str())
    vocabulary = spelt["model"]["vocab"]
    spelt["model"]["vocab"] = {text: 263 - i if i > 3 else i for text, i in vocabulary.items()}
    spelt["model"]["vocab"] = dict(sorted(spelt["model"]["vocab"].items(), key=lambda item: item[1]))
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spelt)), eos_token="<|end|>")
    critic = verl.Critic(str(tiny), tokenizer=other)
    # With something read between two turns, only the turns are in the text.
    masks = [[int(position != 2) for position in range(length)] for length in known.lengths("response_tokens")]
    read = sequences.drop(["response", "response_mask"]).add({"response_mask": masks})
    read = read.add(ResponseText(actor.tokenizer, actor.ends).columns(read))
    assert verl.Critic.from_pretrained(str(tiny)).compute_values(read)["values"]
    calls = [lambda: critic.compute_values(sequences), lambda: critic.update(sequences, [1.0, 2.0])]
    for method in (*calls, lambda: critic.compute_values(read)):
        with pytest.raises(ConfigError, match=r"actor_tokenizer=actor\.tokenizer"):
            method()
    of_known = critic.compute_values(known)["values"]
    critic.actor_tokenizer = actor.tokenizer
    assert critic.compute_values(sequences)["values"] == of_known
    assert critic.compute_values(sequences).lengths("values") == sequences.lengths("response_tokens")
    own = verl.Critic.from_pretrained(str(tiny))
    assert own.compute_values(sequences).lengths("values") == sequences.lengths("response_tokens")


def test_a_mixture_of_experts_in_fp64_has_the_values_of_its_fp32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS["experts"]()).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    values = []
    for dtype in ("float64", "float32"):
        critic = verl.Critic(str(tmp_path), dtype=dtype)
        torch.nn.init.ones_(critic.model.score.weight)
        values.append(torch.tensor(critic.compute_values(sequences_of(["one", "two"]))["values"]))
    assert values[0].abs().max() > 0.1
    torch.testing.assert_close(values[0], values[1], rtol=1e-4, atol=1e-4, check_dtype=False)
