"""What scripts of TRL expect of its trainers besides training: names, entries of the log, attributes, rows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from verl.errors import ConfigError, DataError
from verl.trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from verl.trl.losses import grpo_algorithm, rloo_algorithm
from verl.trl.rewards import (
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

PROMPTS = [{"prompt": f"Say {number}: "} for number in range(4)]
PAIRS = [{"prompt": f"Say {i}: ", "chosen": "aaaa", "rejected": "zzzz zz"} for i in range(4)]
TURNS = [{"prompt": f"Say {i}: ", "completion": "aaaa"} for i in range(4)]
LABELS = [{**row, "label": i % 2 == 0} for i, row in enumerate(TURNS)]
SMALL = {"save_strategy": "no", "lr_scheduler_type": "constant", "per_device_train_batch_size": 2}


class Stream:
    """Rows without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def online(
    kind: Any, config: Any, tiny: Path, folder: Path, reward: Any = length, rows: Any = PROMPTS, **more: Any
) -> Any:
    names = ("eval_dataset", "reward_processing_classes")
    options = {"num_generations": 2, "max_completion_length": 4, "max_steps": 2, **SMALL}
    options |= {name: value for name, value in more.items() if name not in names}
    return kind(str(tiny), reward, config(str(folder), **options), rows, **{n: more[n] for n in names if n in more})


def test_rloo_trains_on_whole_responses_with_the_kl_in_the_reward(tiny: Path, tmp_path: Path) -> None:
    trainer = online(RLOOTrainer, RLOOConfig, tiny, tmp_path, eval_dataset=PROMPTS[:1])
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    assert any((weight != before[name]).any() for name, weight in trainer.model.named_parameters())
    assert {"rewards/length/mean", "rewards/length/std", "kl", "train_loss", "num_tokens"} <= trainer.state.log_history[
        -1
    ].keys()
    assert isinstance(trainer.evaluate()["eval_loss"], float) and trainer.ref_model is not None
    assert (trainer.reward_func_names, trainer.reward_weights.tolist()) == (["length"], [1.0])
    algorithm = rloo_algorithm(RLOOConfig(beta=0.0, epsilon_high=0.3, normalize_advantages=True))
    assert (algorithm.kl_in, algorithm.clip_bounds, algorithm.std_epsilon) == ("none", (0.2, 0.3), 1e-4)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="RLOOTrainer has no argument 'tools'"):
        RLOOTrainer(str(tiny), length, RLOOConfig(), PROMPTS, tools=[print])


@pytest.mark.parametrize("several", [False, True])
def test_an_evaluation_of_completions_has_a_loss_and_may_be_of_several_sets(
    tiny: Path, tmp_path: Path, several: bool
) -> None:
    rows: Any = {"a": PROMPTS[:1], "b": Stream(PROMPTS[1:2])} if several else PROMPTS[:1]
    trainer = online(GRPOTrainer, GRPOConfig, tiny, tmp_path, eval_dataset=rows, eval_strategy="steps", eval_steps=2)
    trainer.train()
    names = ["eval_a_loss", "eval_b_loss"] if several else ["eval_loss"]
    for name in names:
        steps = [entry["step"] for entry in trainer.state.log_history if name in entry]
        assert (steps[0], steps[-1]) == (0, 2) and len(steps) <= 3, "before, at its time, and not twice at the end"


def test_sets_of_recorded_rows_are_evaluated_while_training(tiny: Path, tmp_path: Path) -> None:
    args = SFTConfig(str(tmp_path), **SMALL, max_steps=3, eval_strategy="steps", eval_steps=2)
    trainer = SFTTrainer(str(tiny), args=args, train_dataset=TURNS, eval_dataset={"a": TURNS[:2], "b": TURNS[2:]})
    trainer.train()
    for name in ("eval_a_loss", "eval_b_loss"):
        assert [entry["step"] for entry in trainer.state.log_history if name in entry] == [0, 2, 3]


def test_trainers_hold_the_tokens_of_their_rows(tiny: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    first = tokenizer("Say 0: ")["input_ids"]
    dpo = DPOTrainer(
        str(tiny), args=DPOConfig(str(tmp_path), **SMALL), train_dataset=PAIRS, eval_dataset={"x": PAIRS[:1]}
    )
    assert (
        dpo.train_dataset.column_names == ["prompt_ids", "chosen_ids", "rejected_ids"] and len(dpo.train_dataset) == 4
    )
    assert dpo.train_dataset[0]["prompt_ids"] == first and "prompt_ids" in next(iter(dpo.eval_dataset["x"]))
    sft = SFTTrainer(str(tiny), args=SFTConfig(str(tmp_path), **SMALL), train_dataset=TURNS)
    row = sft.train_dataset[0]
    assert row["labels"] == [-100] * len(first) + row["input_ids"][len(first) :]
    kto = KTOTrainer(str(tiny), args=KTOConfig(str(tmp_path), **SMALL), train_dataset=LABELS)
    assert kto.train_dataset["label"] == [1.0, 0.0, 1.0, 0.0] and kto.train_dataset[0]["prompt_ids"] == first
    reward = RewardTrainer(str(tiny), args=RewardConfig(str(tmp_path), **SMALL), train_dataset=PAIRS)
    assert reward.train_dataset.column_names == ["chosen_ids", "rejected_ids"]
    assert {"dpo", "trl"} <= set(dpo.model.model_tags) and "reward-trainer" in reward.model.model_tags


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("kind", "config", "rows"),
    [(SFTTrainer, SFTConfig, TURNS), (DPOTrainer, DPOConfig, PAIRS), (RewardTrainer, RewardConfig, PAIRS)],
)
def test_rows_that_are_tokens_are_trained_as_those_of_texts(
    tiny: Path, tmp_path: Path, kind: Any, config: Any, rows: Any
) -> None:
    def losses(rows: Any) -> tuple[list[float], Any]:
        args = config(str(tmp_path), **SMALL, max_steps=2, logging_steps=1)
        trainer = kind(str(tiny), args=args, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.train_dataset

    expected, held = losses(rows)
    assert losses(list(held))[0] == pytest.approx(expected, abs=1e-6)


def test_rows_of_tokens_may_say_which_of_them_are_trained(tiny: Path, tmp_path: Path) -> None:
    masked = [
        {"input_ids": [5, 6, 7, 8], "assistant_masks": [0, 0, 1, 1]},
        {"input_ids": [5, 6, 7], "assistant_masks": [0, 0, 1]},
    ]
    args = SFTConfig(str(tmp_path), max_length=2)
    with pytest.raises(DataError, match="within max_length=2 no token of any row is trained"):
        SFTTrainer(str(tiny), args=args, train_dataset=masked)
    trainer = SFTTrainer(str(tiny), args=SFTConfig(str(tmp_path), max_length=3), train_dataset=masked)
    assert trainer.train_dataset[:]["labels"] == [[-100, -100, 7], [-100, -100, 7]]


def test_a_stream_is_read_as_far_as_it_is_trained(tiny: Path, tmp_path: Path) -> None:
    def endless() -> Any:
        while True:
            yield from TURNS

    class Endless:
        def __iter__(self) -> Any:
            return endless()

    args = SFTConfig(str(tmp_path), **SMALL, max_steps=2)
    trainer = SFTTrainer(str(tiny), args=args, train_dataset=Endless())
    assert trainer.train().global_step == 2 and len(trainer.train_dataset) == 4
    assert trainer.args.accelerator_config.dispatch_batches is False
    with pytest.raises(ConfigError, match="max_steps"):
        SFTTrainer(str(tiny), args=SFTConfig(str(tmp_path)), train_dataset=Endless())
    args = SFTConfig(str(tmp_path), max_steps=1, accelerator_config={"dispatch_batches": True})
    with pytest.raises(ConfigError, match="Iterable datasets require `dispatch_batches=False`"):
        SFTTrainer(str(tiny), train_dataset=Endless(), args=args)
    with pytest.raises(ConfigError, match="precompute_ref_log_probs=True is not supported with IterableDataset"):
        DPOTrainer(str(tiny), train_dataset=Stream(PAIRS),
                   args=DPOConfig(str(tmp_path), max_steps=1, precompute_ref_log_probs=True))  # fmt: skip


def test_texts_in_another_column_and_formatted_ones(tiny: Path, tmp_path: Path) -> None:
    rows = [{"story": f"Once {i}"} for i in range(4)]
    text = SFTTrainer(str(tiny), args=SFTConfig(str(tmp_path)), train_dataset=[{"text": row["story"]} for row in rows])
    named = SFTTrainer(str(tiny), args=SFTConfig(str(tmp_path), dataset_text_field="story"), train_dataset=rows)
    formatted = SFTTrainer(
        str(tiny), args=SFTConfig(str(tmp_path)), train_dataset=rows, formatting_func=lambda row: row["story"]
    )
    assert [*text.train_dataset] == [*named.train_dataset] == [*formatted.train_dataset]


def test_what_is_refused_and_warned_of(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="`train_dataset` is required"):
        SFTTrainer(str(tiny), args=SFTConfig(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"reward_processing_classes \(1\) must match reward_funcs \(2\)"):
        online(GRPOTrainer, GRPOConfig, tiny, tmp_path, [length, length], reward_processing_classes=object())
    live = AutoModelForCausalLM.from_pretrained(tiny)
    with pytest.raises(ConfigError, match="ref_model is the model that is trained"):
        DPOTrainer(live, live, DPOConfig(str(tmp_path)), train_dataset=PAIRS)
    with pytest.raises(ConfigError, match="has experts, whose balancing loss TRL adds"):
        SFTTrainer._check_model(_Bare(SFTConfig(str(tmp_path))), _Experts())  # type: ignore[arg-type]
    SFTTrainer._check_model(_Bare(SFTConfig(router_aux_loss_coef=0.0)), _Experts())  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        grpo_algorithm(GRPOConfig(importance_sampling_level="sequence", loss_type="grpo"))
        assert not caplog.records
        grpo_algorithm(GRPOConfig(importance_sampling_level="sequence"))
    assert "weights each sequence by its completion length" in caplog.text


class _Bare:
    """A trainer that has come as far as its arguments."""

    tag = "sft"
    _shown = None

    def __init__(self, args: Any) -> None:
        self.args = args


class _Experts:
    config = AutoConfig.for_model("qwen3_moe")


def test_reward_functions_of_trl() -> None:
    def said(*texts: str) -> list[list[dict[str, str]]]:
        return [[{"role": "assistant", "content": text}] for text in texts]

    texts = said("<think>a</think>b", "<think>a<think>b</think>", "a", "<think>\n</think>\n")
    assert think_format_reward(texts) == [1.0, 0.0, 0.0, 1.0]
    overlong = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    assert overlong(completion_ids=[[1] * n for n in (6, 8, 10, 11)]) == [0.0, -0.5, -1.0, -1.0]
    repeated = get_repetition_penalty_reward(ngram_size=2, max_penalty=-2.0)
    assert repeated(completion_ids=[[1, 2, 3], [1, 1, 1], [1], []]) == pytest.approx([0.0, -1.0, 0.0, 0.0])
    with pytest.raises(ConfigError, match="should not be positive"):
        get_repetition_penalty_reward(max_penalty=1.0)
    with pytest.raises(ConfigError, match="ngram_size=0: at least 1 token"):
        get_repetition_penalty_reward(ngram_size=0)
    with pytest.raises(ConfigError, match="soft_punish_cache=11: from 0 to max_completion_len=10"):
        get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=11)
    assert reasoning_accuracy_reward(said("no end"), ["1"]) == [0.0]


def test_answers_are_compared_as_mathematics() -> None:
    pytest.importorskip("math_verify")
    from verl.trl.rewards import accuracy_reward, get_cosine_scaled_reward

    texts = [[{"role": "assistant", "content": rf"So \boxed{{{answer}}}"}] for answer in (r"\frac{1}{2}", "3", "3")]
    extras: dict[str, list[Any]] = {}
    assert accuracy_reward(texts, [r"\frac{2}{4}", "$4$", "no maths"], log_extra=extras.__setitem__) == [1.0, 0.0, None]
    assert extras["answer_parsed"][2] == "[skipped]" and extras["solution"][0] == r"\frac{2}{4}"
    cosine = get_cosine_scaled_reward(max_len=4)
    assert cosine(texts, [r"\frac{2}{4}", "$4$", "no maths"], [[1] * 4, [], []]) == pytest.approx([0.5, -1.0, None])
