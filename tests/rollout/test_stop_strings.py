from __future__ import annotations

from tests.conftest import byte_tokenizer
from verl.rollout.stop_strings import StopWatch


def test_only_an_unfinished_character_is_held_back() -> None:
    tokenizer = byte_tokenizer(merges=(("d", "æ"),))  # the first byte of 日
    tokens = tokenizer("End日!")["input_ids"]
    assert [tokenizer.decode(token) for token in tokens[:3]] == ["E", "n", "d\ufffd"]
    watch = StopWatch(tokenizer, ["!"])
    texts = [watch.read(tokens[: end + 1]) for end in range(len(tokens))]
    assert texts == ["E", "En", "End", "End", "End日", "End日!"]
    watch = StopWatch(tokenizer, ["nd"])
    assert [watch.saw_stop(tokens[:end]) for end in (1, 2, 3)] == [False, False, True]
    assert watch.text == "E"
