"""What a step learned from, as files and in TensorBoard, is what was sampled and scored."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from verl.batch import Batch
from verl.report.completions import SHOWN, completions, without_tokens
from verl.report.reading import TOKENS
from verl.report.sinks import open_logger
from verl.trainer.trainer import Trainer

PROMPTS = [{"prompt": f"Say {i}", "ground_truth": str(i)} for i in range(2)]


def test_the_table_has_what_was_sampled_scored_and_learned(tiny: Path, tmp_path: Path) -> None:
    trainer = Trainer(
        str(tiny),
        None,
        lambda responses, prompts: [float(len(set(r))) for r in responses],
        algorithm="grpo",
        n=4,
        sampling={"max_new_tokens": 5},
        log_dir=tmp_path,
    )
    record = trainer.step(PROMPTS)
    trainer.step(PROMPTS)
    trainer.close()
    trainer.logger.close()
    files = sorted(file.name for file in (tmp_path / "completions").iterdir())
    assert files == ["train-000001.parquet", "train-000002.parquet"]
    rows = pq.read_table(tmp_path / "completions" / files[0]).to_pylist()
    assert len(rows) == 8 and {row["task"] for row in rows} == set(trainer.tasks)
    assert [row["ground_truth"] for row in rows] == ["0"] * 4 + ["1"] * 4
    assert all(row["prompt"].find(f"Say {row['ground_truth']}") >= 0 for row in rows)
    assert [row["reward"] for row in rows] == [float(len(set(row["response"]))) for row in rows]
    assert sum(row["reward"] for row in rows) / 8 == pytest.approx(record["reward/mean"])
    assert sum(row["length"] for row in rows) / 8 == pytest.approx(record["response/length"])
    assert {row["finish"] for row in rows} <= {"stop", "length"}
    for row in rows:
        assert len(row["tokens/text"]) == len(row["tokens/mask"]) == row["length"]
        own = [a for a, mask in zip(row["tokens/advantage"], row["tokens/mask"], strict=True) if mask]
        assert sum(own) / len(own) == pytest.approx(row["advantage"], abs=1e-6)
    entropies = [value for row in rows for value in row["tokens/entropy"]]
    assert sum(entropies) / len(entropies) == pytest.approx(record["rollout/entropy"])
    for group in (rows[:4], rows[4:]):  # grpo: the best of a group has the highest advantage
        if len({row["reward"] for row in group}) > 1:
            assert max(group, key=lambda r: r["reward"])["advantage"] > 0
        ranked = sorted(group, key=lambda r: r["reward"])
        assert [r["advantage"] for r in ranked] == sorted(r["advantage"] for r in ranked)
    assert any(row["advantage"] for row in rows)

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["tensors"] == ["completions/text_summary"]
    text = events.Tensors("completions/text_summary")[0].tensor_proto.string_val[0].decode()
    assert rows[0]["prompt"].strip().splitlines()[0] in text
    assert {h.histogram_value.num for h in events.Histograms("reward/histogram")} == {8}
    assert {h.histogram_value.num for h in events.Histograms("response/length_histogram")} == {8}


def test_the_first_samples_have_their_tokens_with_what_is_known_of_them() -> None:
    size = SHOWN + 2
    columns = {"prompt_tokens": [[1]] * size, "response_tokens": [[5, 6]] * size, "response_mask": [[1, 0]] * size}
    rows = Batch.from_columns({"id": [str(row) for row in range(size)], **columns, "response": ["x"] * size})
    rows = rows.add({"rollout_log_probs": [[-1.0, 0.0]] * size})
    prepared = rows.slice(1).add({"log_probs": [[-1.25, 0.0]] * (size - 1), "advantages": [[0.5, 0.0]] * (size - 1)})
    table = completions({"main": rows}, {"main": prepared}, str)
    left_out, known, *_, last = table.select(TOKENS).to_pylist()
    assert known == dict(zip(TOKENS, (["[5]", "[6]"], [1, 0], [0.5, 0.0], [1.0, 0.0], [-0.25, 0.0]), strict=True))
    assert left_out == {**known, "tokens/advantage": None, "tokens/mismatch": None}
    assert last == dict.fromkeys(TOKENS) and table.num_rows == size
    shown = without_tokens(table)
    assert shown.num_rows == SHOWN and shown.column_names == [n for n in table.column_names if n not in TOKENS]


def test_a_sample_that_abstained_has_neither_reward_nor_advantage(tiny: Path, tmp_path: Path) -> None:
    def reward(responses: list[str], prompts: list[str]) -> list[float | None]:
        return [None if row == 0 else float(row) for row in range(len(responses))]

    trainer = Trainer(str(tiny), None, reward, algorithm="grpo", n=4, sampling={"max_new_tokens": 5}, log_dir=tmp_path)
    trainer.step(PROMPTS[:1])
    trainer.close()
    trainer.logger.close()
    first, *others = pq.read_table(tmp_path / "completions" / "train-000001.parquet").to_pylist()
    assert (first["reward"], first["advantage"]) == (None, None)
    assert all(row["reward"] is not None and row["advantage"] is not None for row in others)


def test_a_disk_that_refuses_is_a_warning_and_the_next_step_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"reward": [1.0], "length": [3]})
    log = open_logger(tmp_path, [])
    (tmp_path / "completions").write_text("in the way")
    log.completions(1, lambda: table)
    assert "were not saved" in caplog.text
    (tmp_path / "completions").unlink()
    log.completions(2, lambda: table)
    assert [file.name for file in (tmp_path / "completions").iterdir()] == ["train-000002.parquet"]
    assert any(sink.name == "completions" for sink in log.sinks)
    log.close()


def test_samples_are_headed_by_what_the_user_says_last() -> None:
    chat = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("user", "What is 1+1?")]
    messages = json.dumps([{"role": role, "content": content} for role, content in chat])
    parts = json.dumps([{"role": "user", "content": [{"type": "text", "text": "In parts"}]}])
    rows = Batch.from_rows(
        [
            {"id": str(row), "prompt_tokens": [1], "response_tokens": [2], "response": "x", **given}
            for row, given in enumerate([{"messages": messages}, {"messages": parts}, {"prompt": "As text"}, {}])
        ]
    )
    table = completions({"main": rows}, {}, lambda *tokens: "<|template|>")
    assert table["question"].to_pylist() == ["What is 1+1?", "In parts", "As text", None]
    assert table["prompt"].to_pylist() == ["<|template|>"] * 4
