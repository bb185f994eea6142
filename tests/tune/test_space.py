"""`--search`: what it means, and what is refused."""

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from verl.errors import ConfigError
from verl.tune.space import combinations, parse


def test_ranges_and_choices():
    assert parse(["a.lr=1e-6..1e-4:log", "b=1..8", "c=.5..2", "d=-1..1", "e=1..8.0", "f=1..8:log"]) == {
        "a.lr": FloatDistribution(1e-6, 1e-4, log=True),
        "b": IntDistribution(1, 8),
        "c": FloatDistribution(0.5, 2.0),
        "d": IntDistribution(-1, 1),
        "e": FloatDistribution(1.0, 8.0),
        "f": IntDistribution(1, 8, log=True),
    }


def test_values_are_those_of_an_override_as_written():
    values = ("../a.jsonl", "{task: sum, size: 3}", "'x, y'", "null", "1e-6")
    assert parse([f"data.train={', '.join(values)}"]) == {"data.train": CategoricalDistribution(values)}


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
