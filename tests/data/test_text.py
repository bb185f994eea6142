"""One response, one text: whoever reads it gets all of it but its ends and padding."""

from __future__ import annotations

from typing import Any

import pytest

from tests.templates import byte_level, spaced
from verl.data.text import ResponseText, spelled
from verl.rollout.base import SamplingParams
from verl.rollout.stop_strings import StopWatch, cut_text

SPECIAL = ["<s>", "</s>", "<pad>", "<think>", "</think>", "<|user|>"]


@pytest.fixture(params=[byte_level, spaced])
def reader(request: pytest.FixtureRequest) -> Any:
    made = request.param(SPECIAL, eos_token="</s>", pad_token="<pad>", bos_token="<s>")
    made.clean_up_tokenization_spaces = True
    # The switch by which transformers from 5 on does to such tokenizers what older ones do to all.
    made.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    return made


def test_special_tokens_and_spaces_stay(reader: Any) -> None:
    text = "<think>x != y , a . b</think>it 's four ! do n't"
    tokens = reader(text, add_special_tokens=False)["input_ids"]
    end, pad, user = (reader.convert_tokens_to_ids(name) for name in ("</s>", "<pad>", "<|user|>"))
    read = ResponseText(reader, [end, user])
    assert read(tokens) == read([*tokens, end]) == read([*tokens, end, pad, pad]) == spelled(reader, tokens) == text
    assert read([*tokens, user]) == text
    assert ResponseText(reader, [end])([*tokens, user]) == f"{text}<|user|>"
    assert reader.decode(tokens, skip_special_tokens=True) != text  # what it would be otherwise
    assert read([]) == ""


def test_an_end_of_letters_is_text_wherever_it_ends_nothing(reader: Any) -> None:
    tokens = reader("a.b.", add_special_tokens=False)["input_ids"]
    assert ResponseText(reader, tokens[-1:])(tokens) == "a.b"


def test_text_that_grows_becomes_the_text(reader: Any) -> None:
    text = "<think>h\u00e9 \u4e8c</think> four , \U0001f642 it is</s><|user|>blue .</s>"
    tokens = reader(text, add_special_tokens=False)["input_ids"]
    read = ResponseText(reader, [reader.eos_token_id])
    watch = StopWatch(read, [])
    for end in range(len(tokens)):
        assert read(tokens).startswith(watch.read(tokens[:end]))
    assert watch.read(tokens, final=True) == read(tokens) == text.replace("</s>", "")


def test_a_stop_string_cuts_the_text_from_the_least_length_on(reader: Any) -> None:
    tokens = reader("<think>four five four five", add_special_tokens=False)["input_ids"]
    read = ResponseText(reader, [reader.eos_token_id])
    assert cut_text(read, tokens, SamplingParams(stop=("five", "ve"))) == "<think>four "
    assert cut_text(read, tokens, SamplingParams(stop=("hink",))) == "<t"
    later = SamplingParams(stop=("five",), min_new_tokens=len(tokens) - 1)
    assert cut_text(read, tokens, later) == "<think>four five four "
