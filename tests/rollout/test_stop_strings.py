from __future__ import annotations

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.conftest import byte_tokenizer
from verl.data.text import ResponseText
from verl.rollout.base import Request, SamplingParams
from verl.rollout.embedded.response import Response, ResponseOptions
from verl.rollout.stop_strings import StopWatch


def test_only_an_unfinished_character_is_held_back() -> None:
    tokenizer = byte_tokenizer(merges=(("d", "æ"),))  # the first byte of 日
    tokens = tokenizer("End日!")["input_ids"]
    assert [tokenizer.decode(token) for token in tokens[:3]] == ["E", "n", "d\ufffd"]
    watch = StopWatch(ResponseText(tokenizer, [0]), ["!"])
    texts = [watch.read(tokens[: end + 1]) for end in range(len(tokens))]
    assert texts == ["E", "En", "End", "End", "End日", "End日!"]
    watch = StopWatch(ResponseText(tokenizer, [0]), ["nd"])
    assert [watch.saw_stop(tokens[:end]) for end in (1, 2, 3)] == [False, False, True]
    assert watch.text == "E"


def test_a_special_token_leaves_the_space_behind_it() -> None:
    # As Llama 2 decodes: a space at the beginning of a text is the tokenizer's own.
    core = Tokenizer(models.BPE({"</s>": 0, "▁": 1, "▁a": 2, "b": 3}, []))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    for tokens in ([0, 2, 0, 0, 2, 3], [1, 2, 0, 1, 0, 2], [2, 3, 0, 3, 2]):
        decode = ResponseText(tokenizer, [0])
        watch = StopWatch(decode, [])
        for end in range(len(tokens) + 1):
            written = tokenizer.decode([token for token in tokens[:end] if token])
            assert watch.read(tokens[:end]) == decode(tokens[:end]) == written


def test_a_special_token_written_as_a_stop_string_ends_the_response() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer("Hi<|user|>")["input_ids"]
    assert len(tokens) == 3
    # Special tokens are spelt out, so that a stop string may be of a part of one.
    for stop, finish, text in (
        ("<|user|>", "stop", "Hi"),
        ("<|system|>", None, "Hi<|user|>"),
        ("<|nobody|>", None, "Hi<|user|>"),
        ("Hi<|", "stop", ""),
    ):
        response = Response(
            Request("a", [5], SamplingParams(stop=(stop,), ignore_eos=True)),
            ResponseOptions(0, 260, 100, (0,), tokenizer),
        )
        for token in tokens:
            assert response.finish is None
            response.append(token, -1.0, 0)
        assert (response.finish, response.text()) == (finish, text)
