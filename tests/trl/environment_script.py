"""What TRL makes of turns that are given, in an environment: `python environment_script.py FOLDER`, by TRL's Python.

FOLDER has a tokenizer; its chat template becomes TRL's file for Qwen 2.5. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TURNS = [
    '<tool_call>\n{"name": "add", "arguments": {"number": 4}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "add", "arguments": {"number": -1}}\n</tool_call>'
    '\n<tool_call>\n{"name": "gone", "arguments": {}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call><|im_end|>',
    "It is 7.<|im_end|>",
]


class Counter:
    def reset(self, start: int, **row: Any) -> str:
        self.total = start
        return f" From {start}."

    def add(self, number: int) -> int:
        """Add to the total.

        Args:
            number: what to add
        """
        if number < 0:
            raise ValueError("no negative numbers")
        self.total += number
        return self.total

    async def read(self) -> str:
        """Read the total."""
        return f"total {self.total}"

    @property
    def broken(self) -> int:
        raise AssertionError("properties are not read")

    def get_reward(self) -> float:
        return float(self.total)


def main(folder: Path) -> None:
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=8192, **sizes))
    seen: dict[str, Any] = {}

    class Scripted(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        turn = 0

        def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **options: Any) -> Any:
            tokens = tokenizer(TURNS[self.turn], add_special_tokens=False)["input_ids"]
            self.turn += 1
            return [tokens for _ in prompt_ids], [[-0.5] * len(tokens) for _ in prompt_ids]

        def _tool_call_loop(self, prompts: Any, prompt_ids: Any, *arguments: Any) -> Any:
            result = super()._tool_call_loop(prompts, prompt_ids, *arguments)
            seen.update(prompt=prompt_ids[0], mask=result[0][0], tokens=result[2][0])
            return result

    def reward(completions: Any, environments: Any, **columns: Any) -> list[float]:
        seen.update(messages=completions[0], total=environments[0].total)
        return [0.0] * len(completions)

    args = trl.GRPOConfig(
        str(folder / "out"), max_steps=1, num_generations=2, per_device_train_batch_size=2, max_completion_length=2048,
        report_to="none", save_strategy="no", use_cpu=True, bf16=False,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Count."}], "start": 3}])
    trainer = Scripted(model, reward, args, rows, processing_class=tokenizer, environment_factory=Counter)
    trainer.train()
    logged = next(record for record in trainer.state.log_history if "rewards/Counter/mean" in record)
    print(json.dumps({**seen, "reward": logged["rewards/Counter/mean"], "template": tokenizer.chat_template}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
