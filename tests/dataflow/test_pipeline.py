from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl.batch import Batch
from verl.dataflow.graph import Graph, Node
from verl.dataflow.nodes import RewardNode, UpdateNode, register_node
from verl.errors import ConfigError
from verl.roles.actor import Actor
from verl.roles.updater import Updater
from verl.rollout.base import SamplingParams
from verl.trainer.pipeline import RLDataPipeline
from verl.trainer.trainer import Trainer


class Echo:
    """A policy that answers with its prompt's length."""

    def prompts(self, prompts: list[str]) -> Batch:
        return Batch.from_columns({"group": [f"p{i}" for i in range(len(prompts))], "prompt": prompts})

    def as_node(self, name: str) -> Node:
        def generate(prompts: Batch) -> Iterator[Batch]:
            for row in reversed(list(prompts.rows())):
                yield Batch.from_rows(
                    [{"id": f"{row['group']}/{k}", "response": f"{len(row['prompt'])}.{k}"} for k in range(2)]
                )

        return Node(
            name=name,
            run=generate,
            kind="source",
            inputs=("group", "prompt"),
            outputs=("id", "response"),
            slot="cpu:0",
            samples=lambda prompts: [[f"{group}/{k}" for k in range(2)] for group in prompts["group"]],
        )


class Learner:
    """An updater of two nodes."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def as_node(self, name: str) -> list[Node]:
        def prepare(batch: Batch) -> Batch:
            mean = sum(batch["reward"]) / len(batch)
            return Batch.from_columns({"centred": [reward - mean for reward in batch["reward"]]})

        def update(batch: Batch) -> tuple[None, dict[str, float]]:
            self.seen += batch["centred"]
            return None, {"loss/actor": sum(batch["centred"])}

        return [
            Node(name=f"{name}/prepare", run=prepare, kind="batch", inputs=("reward",), outputs=("centred",)),
            Node(name=name, run=update, kind="batch", inputs=("centred",), slot="cpu:0"),
        ]


def reward_fn(texts: list[str]) -> list[float]:
    return [float(text) for text in texts]


def test_stages_run_as_one_graph() -> None:
    learner = Learner()
    pipeline = RLDataPipeline()
    pipeline.add_stage("rollout", Echo()).add_stage("reward", reward_fn)
    pipeline.add_stage("shout", lambda batch: {"loud": [text + "!" for text in batch["response"]]})
    pipeline.add_stage("update", learner)
    result = pipeline.run(["a", "bbb"])
    assert result.batch["reward"] == [1.0, 1.1, 3.0, 3.1]
    assert result.batch["loud"] == ["1.0!", "1.1!", "3.0!", "3.1!"]
    assert result.batch["prompt"] == ["a", "a", "bbb", "bbb"]
    assert learner.seen == pytest.approx([-1.05, -0.95, 0.95, 1.05])
    assert list(result.metrics) == ["loss/actor"]
    assert pipeline.graph.order == ["rollout", "reward", "shout", "update/prepare", "update"]


def test_same_graph_as_one_written_by_hand() -> None:
    learner = Learner()
    pipeline = RLDataPipeline().add_stage("rollout", Echo()).add_stage("reward", reward_fn).add_stage("update", learner)
    read = ("response", "finish?", "episode?", "episode_error?", "episode_reward?", "group?")
    written = ("reward", "abstain_reason", "reward/*")
    score = Node(name="reward", run=lambda b: None, inputs=read, outputs=written)
    assert pipeline.graph == Graph([Echo().as_node("rollout"), score, *learner.as_node("update")])


def tiny_actor(lr: float = 1e-6) -> Actor:
    letters = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz "]
    core = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Actor(LlamaForCausalLM(config), tokenizer, sampling=SamplingParams(max_new_tokens=6), lr=lr)


def text_lengths(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


@pytest.mark.parametrize(("algorithm", "samples"), [("ppo", 1), ("grpo", 8), ("remax", 2)])
def test_three_stages_are_a_training_step_and_the_same_graph_as_the_trainers(algorithm: str, samples: int) -> None:
    actor = tiny_actor()
    pipeline = RLDataPipeline().add_stage("rollout", actor).add_stage("reward", text_lengths)
    pipeline.add_stage("update", Updater(algorithm, actor=actor))
    before = [shard.tensor.clone() for shard in actor.shards()]
    result = pipeline.run(["once upon a time"] * 4)
    assert len(result.batch) == 4 * samples
    assert result.batch["reward"] == [float(len(text)) for text in result.batch["response"]]
    assert "loss/actor" in result.metrics
    assert any(not torch.equal(old, shard.tensor) for old, shard in zip(before, actor.shards(), strict=True))
    assert Trainer(tiny_actor(), reward_fn=text_lengths, algorithm=algorithm, log_dir=False).graph == pipeline.graph


def share_of_a(texts: list[str]) -> list[float]:
    return [text.count("a") / max(len(text), 1) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_algorithms_of_labels_learn_from_the_rewards_of_a_pipeline(name: str) -> None:
    def learned(lr: float) -> float:
        actor = tiny_actor(lr)
        pipeline = RLDataPipeline(n=8).add_stage("rollout", actor).add_stage("reward", share_of_a)
        pipeline.add_stage("update", Updater(name, actor=actor))
        rewards = [sum(pipeline.run(["once upon a time"] * 8)["reward"]) / 64 for _ in range(16 if lr else 8)]
        return sum(rewards[-4:]) / 4 - sum(rewards[:4]) / 4

    assert learned(1e-2) > 0.1 > 0.04 > abs(learned(0.0))


def test_a_node_gets_the_name_of_its_stage() -> None:
    node = Node(name="anything", run=lambda b: None, inputs=("group",))
    graph = RLDataPipeline().add_stage("mine", node).graph
    assert graph.order == ["mine"]
    assert graph.nodes["mine"].slot == "mine"


def test_a_result_is_read_by_column_or_metric(tiny: Path) -> None:
    actor = Actor(str(tiny), sampling=SamplingParams(max_new_tokens=3))
    pipeline = RLDataPipeline().add_stage("rollout", actor).add_stage("reward", lambda texts: [1.0] * len(texts))
    result = pipeline.add_stage("update", Updater("grpo", actor=actor)).run(["a"])
    assert set(result["reward"]) == {1.0} and result["response"] == result.batch["response"]
    assert result["loss/actor"] == result.metrics["loss/actor"]
    with pytest.raises(KeyError, match="the run gave no 'rewards': did you mean 'reward'"):
        result["rewards"]


def test_two_functions_are_not_both_the_reward(tiny: Path) -> None:
    pipeline = RLDataPipeline().add_stage("rollout", Actor(str(tiny)))
    pipeline.add_stage("filter", lambda samples: samples).add_stage("reward", lambda texts: [0.0] * len(texts))
    with pytest.raises(ConfigError, match="'filter' and 'reward' are both taken for the reward: one that filters"):
        pipeline.run(["a"])


def test_wrong_stages_are_refused() -> None:
    pipeline = RLDataPipeline().add_stage("reward", reward_fn)
    with pytest.raises(ConfigError, match="'reward' already"):
        pipeline.add_stage("reward", reward_fn)
    with pytest.raises(ConfigError, match="stage 'x': a int is no stage"):
        pipeline.add_stage("x", 3)
    with pytest.raises(ConfigError, match="takes plain prompts"):
        pipeline.run(["a"])


def test_a_node_of_the_users_own_is_added_by_name_and_nothing_else_changes() -> None:
    @register_node("shouting")
    class Shouting(RewardNode):
        column = "cost"

        def score(self, responses: list[str], prompts: list[str], polite: list[float] | None = None) -> list[float]:
            assert polite == [1.0] * len(responses)
            return [float(len(text) > 3) for text in responses]

    def polite(batch: Batch) -> dict[str, list[float]]:
        return {"polite": [1.0] * len(batch)}

    options = {"baseline": "group", "cost_limit": 0.5}
    actor = tiny_actor()
    pipeline = RLDataPipeline().add_stage("rollout", actor).add_stage("reward", text_lengths)
    pipeline.add_stage("shouting").add_stage("update", Updater("safe_rlhf", actor=actor, **options))
    usual = Trainer(actor, reward_fn=text_lengths, cost=text_lengths, algorithm="safe_rlhf", log_dir=False, **options)
    mine, others = pipeline.graph, usual.graph.nodes
    assert {name: node for name, node in mine.nodes.items() if name != "shouting"} == {
        name: node for name, node in others.items() if name != "cost"
    }
    assert mine.writers["cost"] == "shouting" and "shouting" in mine.needs["prepare"]
    trainer = Trainer(
        actor, reward_fn=text_lengths, nodes=["shouting"], algorithm="safe_rlhf", log_dir=False, **options
    )
    assert trainer.graph == mine
    # A column of another node is an edge, whichever was added first.
    node = Node(name="", run=lambda b: Batch.from_columns(polite(b)), inputs=("response",), outputs=("polite",))
    pipeline.add_stage("polite", node)
    assert "polite" in pipeline.graph.needs["shouting"]
    result = pipeline.run(["once upon a time"] * 2)
    assert result.batch["cost"] == [float(len(text) > 3) for text in result.batch["response"]]
    assert "cost/mean" in result.metrics


def test_a_column_of_the_users_own_is_logged_and_its_reward_is_one_of_the_trainers() -> None:
    class Kind(RewardNode):
        column = "kindness"

        def score(self, texts: list[str]) -> list[float]:
            return [2.0 for _ in texts]

    trainer = Trainer(tiny_actor(), reward_fn=text_lengths, nodes={"kind": Kind}, n=2, algorithm="grpo", log_dir=False)
    assert set(trainer.sources) == {"reward", "kind"}
    assert trainer.step(["once"] * 2)["kind/mean"] == 2.0
    assert trainer.evaluate(["once"]).samples["kindness"] == [2.0]


def test_a_graph_without_what_the_algorithm_reads_is_refused_by_name() -> None:
    actor = tiny_actor()
    pipeline = RLDataPipeline().add_stage("rollout", actor).add_stage("update", Updater("grpo", actor=actor))
    with pytest.raises(ConfigError, match="node 'prepare' reads column 'reward', which no node writes"):
        _ = pipeline.graph
    pipeline.add_stage("one", text_lengths).add_stage("two", text_lengths)
    with pytest.raises(ConfigError, match="the stages 'one' and 'two' are both taken for the reward"):
        _ = pipeline.graph
    with pytest.raises(ConfigError, match="nodes 'reward' and 'again' both write"):
        Trainer(actor, reward_fn=text_lengths, nodes={"again": text_lengths}, algorithm="grpo", log_dir=False)
    with pytest.raises(ConfigError, match=r"no node is called 'shoutin'.*register_node"):
        pipeline.add_stage("shoutin")
    with pytest.raises(ConfigError, match="nothing to score with"):
        RewardNode()
    with pytest.raises(ConfigError, match="int is no node"):
        register_node("x")(int)


def test_a_node_that_would_not_be_run_is_refused() -> None:
    class Wrapped:
        def as_node(self, name: str) -> list[Node]:
            return UpdateNode(Updater("grpo", actor=actor)).as_node(name)

    actor = tiny_actor()
    pipeline = RLDataPipeline().add_stage("rollout", actor).add_stage("reward", text_lengths)
    with pytest.raises(ConfigError, match="node 'prepare' is of kind 'update': give an Updater as a stage"):
        pipeline.add_stage("update", Wrapped()).run(["once"])
    with pytest.raises(ConfigError, match="node 'prepare' is of kind 'update'"):
        Trainer(actor, reward_fn=text_lengths, nodes={"again": Wrapped()}, algorithm="grpo", log_dir=False)
    late = Node(name="late", run=lambda batch: None, inputs=("response",), after=("update_actor",))
    stages = RLDataPipeline().add_stage("rollout", actor).add_stage("reward", text_lengths)
    stages.add_stage("update", Updater("grpo", actor=actor)).add_stage("late", late)
    with pytest.raises(ConfigError, match="node 'late' comes after the update of the models, which ends a step"):
        stages.run(["once"])
