import pytest

from verl.batch import Batch
from verl.dataflow.graph import Graph, Node
from verl.errors import ConfigError


def nothing(batch: Batch) -> None:
    return None


def node(name: str, inputs: str = "", outputs: str = "", **options: object) -> Node:
    return Node(name=name, run=nothing, inputs=inputs.split(), outputs=outputs.split(), **options)  # type: ignore[arg-type]


def step() -> list[Node]:
    return [
        node("rollout", "prompt_tokens", "id group response_tokens rollout_log_probs", kind="source", slot="cpu:0"),
        node("reward", "response_tokens", "reward"),
        node("ref", "response_tokens", "ref_log_probs", slot="cpu:0"),
        node("prepare", "reward ref_log_probs rollout_log_probs", "advantages", kind="batch"),
        node("update_actor", "advantages", kind="batch", slot="cpu:0"),
        node("update_critic", "advantages", kind="batch", slot="cpu:0", after=("update_actor",)),
    ]


def test_order_follows_columns_and_after() -> None:
    graph = Graph(reversed(step()))
    place = {name: at for at, name in enumerate(graph.order)}
    assert place["rollout"] < place["reward"] < place["prepare"] < place["update_actor"] < place["update_critic"]
    assert place["rollout"] < place["ref"] < place["prepare"]
    assert graph.needs["prepare"] == ("ref", "reward", "rollout")


def test_batch_node_that_reads_everything_comes_after_what_is_declared_before_it() -> None:
    nodes = [*step()[:3], node("prepare", "*", "*", kind="batch"), node("shout", "response_tokens", "loud")]
    graph = Graph(nodes)
    assert graph.needs["prepare"] == ("rollout", "reward", "ref")
    assert graph != Graph([nodes[0], nodes[4], *nodes[1:4]])
    assert Graph([nodes[0], node("reward", "*", "reward"), *nodes[2:]]).needs["reward"] == ("rollout",)
    update = node("update", "*", kind="batch", after=("prepare",))
    assert Graph([*nodes, update]).needs["update"] == ("rollout", "prepare")
    assert Graph([*nodes, update]).before["update"] == {"rollout", "reward", "ref", "prepare"}


def test_equality_is_of_structure() -> None:
    graph = Graph(step())
    other = [node("reward", "response_tokens", "reward") if n.name == "reward" else n for n in reversed(step())]
    assert graph == Graph(other)
    assert graph != Graph(step()[:-1])
    for change in ({"slot": "elsewhere"}, {"kind": "batch"}, {"outputs": "reward bonus"}, {"inputs": "id"}):
        changed = {"inputs": "response_tokens", "outputs": "reward", **change}
        assert graph != Graph([node("reward", **changed) if n.name == "reward" else n for n in step()])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("a", "x", "y"), node("b", "y", "z"), node("c", "z", "x")], ["cycle", "a", "b", "c"]),
        ([node("a", "values", "values")], ["cycle", "a -> a"]),
        ([node("a", outputs="reward"), node("b", outputs="reward")], ["'reward'", "'a'", "'b'"]),
        ([node("a", outputs="prize"), node("b", "prise")], ["'prise'", "'b'", "did you mean 'prize'"]),
        ([node("a", "advantges")], ["'advantges'", "did you mean 'advantages'"]),
        ([node("a"), node("b", after=("aa",))], ["'aa'", "did you mean 'a'"]),
        ([node("a"), node("a")], ["name 'a'"]),
        ([node("a", kind="source"), node("b", kind="source")], ["one source", "'a' and 'b'"]),
        ([node("a", outputs="values"), node("b", "values", kind="source")], ["source 'b'", "'values'", "'a'"]),
        ([node("a"), node("b", after=("c",)), node("c", after=("b",))], ["cycle", "b", "c"]),
        ([node("a", "y?", "x?"), node("b", "x?", "y?")], ["cycle", "a", "b"]),
        ([node("a", outputs="x"), node("b", outputs="x?")], ["'x'", "'a'", "'b'"]),
        ([node("a", kind="source"), node("b", "reward")], ["'reward'", "'b'", "prompts do not bring it"]),
    ],
)
def test_wrong_graphs_are_refused_by_name(nodes: list[Node], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Graph(nodes)
    for word in words:
        assert word in str(caught.value)


def test_a_column_that_may_be_missing_is_an_edge_where_a_node_writes_it() -> None:
    nodes = [node("late", "bonus? finish?", "reward"), node("early", "response", "bonus? bonus/*")]
    graph = Graph(nodes)
    assert graph.order == ["early", "late"] and graph.needs["late"] == ("early",)
    assert graph.nodes["late"].reads == {"bonus": False, "finish": False}
    assert graph.nodes["early"].writes == {"bonus": False}


def test_column_of_the_input_is_not_written_again() -> None:
    with pytest.raises(ConfigError, match="'answer' is an input of the graph and is written by 'a'"):
        Graph([node("a", outputs="answer")], inputs=["answer"])
    assert Graph([node("a", "answer")], inputs=["answer"]).order == ["a"]


def test_wrong_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown kind 'row', did you mean 'rows'"):
        node("a", kind="row")
    with pytest.raises(ConfigError, match="a list of names"):
        Node(name="a", run=nothing, inputs="reward")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"node 'a' reads \['reward/\*'\]: name the columns"):
        node("a", inputs="reward/*")
    with pytest.raises(ConfigError, match="groups must be at least 1"):
        node("a", groups=0)


def test_drawing_has_a_line_for_each_node_with_its_columns() -> None:
    drawing = str(Graph(step())).splitlines()
    assert len(drawing) == 6
    assert drawing[0].startswith("rollout")
    prepare = next(line for line in drawing if "prepare" in line)
    assert prepare.startswith("      └▶ prepare")
    assert "ref_log_probs, reward, rollout_log_probs ─▶ advantages" in prepare
