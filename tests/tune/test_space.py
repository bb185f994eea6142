"""`--search`: what it means, and what is refused."""

import pytest

from verl.errors import ConfigError
from verl.tune.space import Choice, Range, combinations, parse


def test_ranges_and_choices():
    assert parse(["a.lr=1e-6..1e-4:log", "b=1..8", "c=.5..2", "d=-1..1"]) == (
        Range("a.lr", 1e-6, 1e-4, log=True),
        Range("b", 1, 8),
        Range("c", 0.5, 2.0),
        Range("d", -1, 1),
    )
    assert type(parse(["b=1..8"])[0].low) is int
    assert type(parse(["b=1..8.0"])[0].low) is float


def test_values_are_those_of_an_override_as_written():
    (found,) = parse(["data.train=../a.jsonl, {task: sum, size: 3}, 'x, y', null, 1e-6"])
    assert found == Choice("data.train", ("../a.jsonl", "{task: sum, size: 3}", "'x, y'", "null", "1e-6"))


@pytest.mark.parametrize(
    ("searches", "said"),
    [
        ([], "nothing to search"),
        (["lr"], "--search 'lr' is no search"),
        (["lr="], "is no search"),
        (["lr=3..1"], "--search lr: 3 must be below 1"),
        (["lr=0..1:log"], "begins above 0, not at 0"),
        (["lr=1e-5"], "is a single value"),
        (["lr=1..x"], "is a single value"),
        (["lr=1,2,1"], "a value is there twice"),
        (["lr=1,[2"], "is no list of values"),
        (["lr=1],[2"], "is no list of values"),
        (["lr=1,2", "lr=1..2"], "--search lr is given twice"),
    ],
)
def test_what_is_no_search_is_refused(searches, said):
    with pytest.raises(ConfigError) as error:
        parse(searches)
    assert said in str(error.value)


def test_a_small_space_is_listed_whole():
    space = parse(["n=1..3", "kl=0,0.1"])
    assert len(combinations(space, 6)) == 6
    assert combinations(space, 6)[1] == {"n": 1, "kl": "0.1"}
    assert combinations(space, 5) == []
    assert combinations(parse(["n=1..1000000000000", "m=1,2"]), 20) == []
    assert combinations(parse(["lr=0.1..0.2"]), 20) == []
