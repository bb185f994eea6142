"""A GRPO script as users of TRL write it; `test_trl.py` runs it with the import line changed and nothing else."""

import os
import re

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

model_name, output_dir = os.environ["MODEL"], os.environ["OUTPUT"]
SYSTEM = "Think first, then answer."


def make_conversation(number):
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What is {number} + {number}?"},
        ],
        "solution": str(2 * number),
    }


def format_reward(completions, **kwargs):
    """1 if the completion has a digit."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.search(r"\d", content) else 0.0 for content in contents]


def accuracy_reward(prompts, completions, solution, **kwargs):
    """How much of the solution's letters the completion has."""
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    contents = [completion[0]["content"] for completion in completions]
    return [sum(ch in content for ch in truth) / len(truth) for content, truth in zip(contents, solution, strict=True)]


class Watch(TrainerCallback):
    def __init__(self):
        self.steps, self.rewards = 0, []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.rewards.append(logs["reward"])


model = AutoModelForCausalLM.from_pretrained(model_name)
tokenizer = AutoTokenizer.from_pretrained(model_name)
train_dataset = Dataset.from_list([make_conversation(number) for number in range(16)])

training_args = GRPOConfig(
    output_dir=output_dir,
    learning_rate=5e-3,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=8,
    num_train_epochs=1,
    max_steps=3,
    temperature=0.9,
    beta=0.04,
    reward_weights=[0.25, 1.0],
    logging_steps=1,
    save_steps=2,
    report_to="none",
    bf16=False,
    seed=7,
)

watch = Watch()
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[format_reward, accuracy_reward],
    args=training_args,
    train_dataset=train_dataset,
    callbacks=[watch],
)
result = trainer.train()
trainer.save_model(training_args.output_dir)
print("steps", watch.steps, result.global_step, "logged rewards", len(watch.rewards))
