"""Run TRL's own training scripts with their import line changed, and compare them with TRL.

    python scripts/trl_scripts.py FOLDER [--only WORD ...] [--peer .bench/trl] [--keep FOLDER]

FOLDER is TRL's source: `trl/scripts` of release 1.16.0, and `examples/scripts`, which its archive on the package index
lacks, of the repository. Twelve scripts (`SCRIPTS`) are copied, `from trl` becomes `from verl.trl`, and each trains a
tiny model on a few rows, offline: whole, resumed from the middle of that run, and with adapters. Completions of GRPO
and RLOO are recorded ones, once more they are sampled. `--peer` is an environment with TRL and datasets
(`benchmarks/peer_env.sh trl`), of the Python that runs this. TRL itself runs the same copies with the line as it was.
The table has a row a script; the exit code is 1 if something in it is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_SECONDS = 3000
#: Final losses may differ by this share.
_BOUND = 0.02
_SIZES: dict[str, Any] = {
    "max_steps": 4, "save_steps": 2, "logging_steps": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 4,
    "bf16": False, "use_cpu": True, "report_to": "none", "gradient_checkpointing": False,
}  # fmt: skip
_SAMPLED = {
    "num_generations": 4, "max_completion_length": 40, "beta": 0.1, "num_iterations": 2, "shuffle_dataset": False,
}  # fmt: skip
_ADAPTERS = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0}
#: What the recorded completions say.
_TEXTS = (
    "<think>\nTwo.\n</think>\n\\boxed{4}", "I do not know", "<think>\nSo.\n</think>\n\\boxed{5}", "\\boxed{4}",
    "four #### 4",
)  # fmt: skip


@dataclass(frozen=True)
class Script:
    """How a script is called.

    Attributes:
        settings: of its command line, beside the sizes.
        changes: of its text: sizes and names that it has no setting for.
        samples: whether it draws completions.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, str] = field(default_factory=dict)
    samples: bool = False
    head: str = "lm"


def _on(data: str, head: str = "lm", **settings: Any) -> dict[str, Any]:
    return {"dataset_name": f"data/{data}", "model_name_or_path": f"models/{head}", **settings}


_REWARDS = {"reward_funcs": ["accuracy_reward", "think_format_reward"], **_SAMPLED}
#: Recorded completions have no log-probs of the engine's.
_UNWEIGHTED = {"vllm_importance_sampling_correction": False}
_SCORE = {"lora_task_type": "SEQ_CLS"}
_WRITTEN_OUT = ", ".join(f"{name}={value!r}" for name, value in (_SIZES | _SAMPLED).items() if name != "learning_rate")
SCRIPTS = {
    "trl/scripts/sft.py": Script(_on("chats")),
    "trl/scripts/dpo.py": Script(_on("pairs")),
    "trl/scripts/kto.py": Script(_on("labels")),
    "trl/scripts/reward.py": Script(_on("pairs", "score"), head="score"),
    "trl/scripts/grpo.py": Script(_on("problems") | _REWARDS | _UNWEIGHTED, samples=True),
    "trl/scripts/rloo.py": Script(_on("problems") | _REWARDS, samples=True),
    "examples/scripts/kto.py": Script(_on("labels")),
    "examples/scripts/reward_modeling.py": Script(
        _on("pairs", "score", eval_strategy="steps", eval_steps=2), head="score"
    ),
    "examples/scripts/sft_nemotron_3.py": Script(_on("thoughts")),
    "examples/scripts/gspo.py": Script(
        {"model_name_or_path": "models/lm", **_UNWEIGHTED, "importance_sampling_level": "sequence", "epsilon": 3e-4,
         "epsilon_high": 4e-4, "loss_type": "grpo", **_SAMPLED}, samples=True,
    ),
    "examples/scripts/grpo_continuous_batching.py": Script(
        _on("sums") | _SAMPLED | _UNWEIGHTED,
        {"use_transformers_continuous_batching = True": "use_cpu = True"}, samples=True,
    ),
    "examples/scripts/rloo.py": Script(
        {}, {"torch.bfloat16": "torch.float32", "max_completion_length=1024": _WRITTEN_OUT, "use_vllm=True,": "",
             "steps_per_generation=8,": "", "gradient_accumulation_steps=2,": "", '"Qwen/Qwen3-0.6B"': '"models/lm"',
             "vllm_mode=\"colocate\",\n": "", 'trainer.push_to_hub(dataset_name="AI-MO/NuminaMath-TIR")': ""},
        samples=True,
    ),
}  # fmt: skip


def make_inputs(work: Path) -> None:
    """Models and data, under the names that the scripts call them by."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    sys.path.insert(0, str(ROOT / "benchmarks"))
    import made_model

    for head, kind in (("lm", AutoModelForCausalLM), ("score", AutoModelForSequenceClassification)):
        torch.manual_seed(0)
        config = made_model.SHAPES["tiny"]()
        config.num_labels = 1
        kind.from_config(config, dtype=torch.float32).save_pretrained(work / "models" / head)
        made_model.tokenizer().save_pretrained(work / "models" / head)
    for name, rows in _rows().items():
        folder = work / name
        folder.mkdir(parents=True)
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if name == "data/sums":  # as its name on the hub, it has a configuration `main`
            files = "".join(f"\n  - split: {split}\n    path: {split}.jsonl" for split in ("train", "test"))
            (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:{files}\n---\n")


def _said(role: str, content: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, **more}]


def _rows() -> dict[str, list[dict[str, Any]]]:
    """Rows by the path of their folder."""
    asks = [f"What is {i} and {i + 1}?" for i in range(20)]
    words = [f"It is {2 * i + 1}." + " So it is." * (i % 4) for i in range(20)]
    pairs = list(zip(asks, words, reversed(words), strict=True))
    problems = [{"problem": ask, "solution": "It is $4$.", "messages": _said("user", ask)} for ask in asks]
    return {
        "data/chats": [{"messages": _said("user", a) + _said("assistant", b)} for a, b, _ in pairs],
        "data/pairs": [{"chosen": _said("user", a) + _said("assistant", b), "score_chosen": 7.0,
                        "rejected": _said("user", a) + _said("assistant", c), "score_rejected": 2.5}
                       for a, b, c in pairs],
        "data/labels": [{"prompt": _said("user", a), "completion": _said("assistant", b), "label": i % 3 != 1}
                        for i, (a, b, _) in enumerate(pairs)],
        "data/thoughts": [{"reasoning_language": "English", "messages":
                           _said("user", a, thinking=None) + _said("assistant", b, thinking=c)} for a, b, c in pairs],
        "data/problems": [{"prompt": _said("user", ask), "solution": "It is $4$."} for ask in asks],
        "data/sums": [{"question": ask, "answer": "One more.\n#### 4"} for ask in asks],
        "AI-MO/NuminaMath-TIR": problems * 20,  # of which a script takes 5 %
    }  # fmt: skip


def recorded(tokenizer: Any, prompt: Sequence[int], number: int) -> list[int]:
    """The completion `number` of a prompt, up to its end."""
    text = _TEXTS[(sum(prompt) + number) % len(_TEXTS)]
    return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def record(package: str, work: Path) -> dict[str, Any]:
    """Completions are recorded ones from now on: of TRL in place of `generate`; returns our trainers' arguments."""
    from transformers import AutoTokenizer, GenerationMixin

    tokenizer, group = AutoTokenizer.from_pretrained(work / "models" / "lm"), _SAMPLED["num_generations"]
    if package != "trl":
        from tests.trl.peer_numbers import Recorded
        from verl.rollout.base import Sample

        class Told(Recorded):
            def add(self, request: Any) -> None:
                prompt = tuple(request.prompt_tokens)
                number = self._asked[prompt] = self._asked.get(prompt, -1) + 1
                tokens = recorded(tokenizer, prompt, number % group)
                self._samples.append(Sample(request.id, tokens, [0.0] * len(tokens), "stop", self.policy_version))

        return {"rollout": Told}

    def generate(self: Any, input_ids: Any, attention_mask: Any, **_: Any) -> Any:
        import torch

        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        answers = [torch.tensor(recorded(tokenizer, prompt, row % group)) for row, prompt in enumerate(prompts)]
        padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=tokenizer.eos_token_id)
        return torch.cat([input_ids, padded], 1)

    GenerationMixin.generate = generate  # type: ignore[method-assign]
    return {}


def copy(source: Path, name: str, package: str, way: str, resume: str | None, target: Path) -> None:
    """The script as `package` runs it; its trainer is kept when it saves."""
    text = (source / name).read_text()
    for old, new in SCRIPTS[name].changes.items():
        if old not in text:
            raise ValueError(f"{name} has no {old!r}")
        text = text.replace(old, new)
    text = re.sub(r"\bfrom trl(?=[ .])", f"from {package}", text)
    text = text.replace("trainer.save_model(", "KEPT.append(trainer)\n    trainer.save_model(", 1)
    if resume:
        text = text.replace("trainer.train()", f"trainer.train(resume_from_checkpoint={resume!r})")
    if way == "sampled":  # random weights earn none of its own rewards
        text = re.sub(r"reward_funcs=[^\n]*,\n", "reward_funcs=LETTERS,\n", text)
    elif package != "trl":
        text = re.sub(r"= ((?:GRPO|RLOO)Trainer)\(\n", r"= \1(\n        **MORE,\n", text)
    if way == "peft":
        text = text.replace("peft_config=LoraConfig()", "peft_config=LoraConfig(r=4)")
    elif "peft_config=LoraConfig()" in text:
        text = text.replace("peft_config=LoraConfig()", "peft_config=None")
    target.write_text(text)


def words(name: str, way: str, output: str, resume: str | None) -> list[str]:
    """The command line of a script."""
    script = SCRIPTS[name]
    if not script.settings:
        return []
    settings = {"output_dir": output, **_SIZES, **script.settings}
    settings |= (_ADAPTERS | (_SCORE if script.head == "score" else {})) if way == "peft" else {}
    settings |= {"resume_from_checkpoint": resume} if resume and name.startswith("trl/") else {}
    pairs = [(f"--{key}", value if isinstance(value, list) else [value]) for key, value in settings.items()]
    return [str(word) for option, values in pairs for word in (option, *values)]


def letters(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that random weights earn."""
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def run_one(package: str, source: Path, name: str, way: str, more: dict[str, Any], before: Any) -> dict[str, Any]:
    """One run: its loss, the logits of the model as it is and as it is loaded."""
    resume = None
    if way == "resumed":
        resume = str(min(Path(before["output"]).glob("checkpoint-*")))
    kept: list[Any] = []
    target = Path(f"{package}-{way}.py").resolve()
    copy(source, name, package, way, resume, target)
    output = f"out/{package}/{way}/{name}"
    if not SCRIPTS[name].settings:
        target.write_text(target.read_text().replace('output_dir="Qwen3-0.6B-RLOO"', f'output_dir="{output}"'))
    sys.argv = [str(target), *words(name, way, output, resume)]
    runpy.run_path(str(target), init_globals={"KEPT": kept, "MORE": more, "LETTERS": letters}, run_name="__main__")
    (trainer,) = kept
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    live, loaded = logits(trainer.model), logits(load(Path(output), SCRIPTS[name].head))
    difference = (live - loaded).abs().max().item()
    same = "" if before is None else (live - before["logits"]).abs().max().item()
    return {"output": output, "loss": losses[-1], "losses": losses, "model": type(trainer.model).__name__,
            "difference": difference, "from_whole": same, "logits": live,
            "entries": sorted({name for entry in history for name in entry})}  # fmt: skip


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 25).view(1, -1)).logits.float()


def load(folder: Path, head: str) -> Any:
    """What was saved, by transformers or peft."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if head == "score" else AutoModelForCausalLM
    if not (folder / "adapter_config.json").exists():
        return kind.from_pretrained(folder, dtype=torch.float32)
    from peft import PeftModel

    return PeftModel.from_pretrained(kind.from_pretrained(f"models/{head}", dtype=torch.float32), folder)


def run_all(package: str, source: Path, peer: Path, only: Sequence[str]) -> None:
    """In a process of the package's own, which begins in the folder of inputs; writes `PACKAGE.json`."""
    sys.path[0] = str(ROOT)
    sys.path += map(str, peer.glob("lib/python3*/site-packages"))
    more, results = record(package, Path.cwd()), {}
    for name, script in SCRIPTS.items():
        if only and not any(word in name for word in only):
            continue
        ways = ["whole", "peft"] if package == "trl" else ["whole", "resumed", "peft"]
        ways += ["sampled"] * (package != "trl" and script.samples)
        runs: dict[str, Any] = {}
        for way in ways:
            before = runs.get("whole", {}) if way == "resumed" else None
            print(f"== {name} {way}", file=sys.stderr, flush=True)
            try:
                runs[way] = run_one(package, source, name, way, {} if way == "sampled" else more, before)
            except (Exception, SystemExit) as error:
                traceback.print_exc()
                runs[way] = {"error": f"{type(error).__name__}: {error}"[:600]}
        results[name] = {way: {k: v for k, v in result.items() if k != "logits"} for way, result in runs.items()}
        Path(f"{package}.json").write_text(json.dumps(results, indent=1))


def table(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[list[str], bool]:
    """The lines, and whether all is as it should be."""
    lines = [f"{'script':<46} {'runs':<5} {'peft':<5} {'resumed':<8} {'loads':<6} final loss ours / TRL's, with peft"]
    good = True
    for name, runs in ours.items():
        whole, peft, resumed = (runs[way] for way in ("whole", "peft", "resumed"))
        sampled = runs.get("sampled", whole)
        checks = {
            "runs": "error" not in whole and "error" not in sampled,
            "peft": peft.get("model", "").startswith("Peft"),
            "resumed": resumed.get("from_whole") == 0,
            "loads": whole.get("difference") == peft.get("difference") == 0,
        }
        losses, problems = [], [f"{way}: {run['error']}" for way, run in runs.items() if "error" in run]
        for way in ("whole", "peft"):
            us, them = (each.get(way, {}).get("loss") for each in (runs, theirs.get(name, {})))
            near = us is not None and (them is None or abs(us - them) <= _BOUND * max(abs(them), 1e-3))
            losses.append(f"{'-' if us is None else f'{us:.5f}'} / {'-' if them is None else f'{them:.5f}'}")
            losses[-1] += "" if near else " (!)"
            good &= near
        good &= all(checks.values())
        cells = {key: "yes" if value else "NO" for key, value in checks.items()}
        lines.append(
            f"{name:<46} {cells['runs']:<5} {cells['peft']:<5} {cells['resumed']:<8} {cells['loads']:<6} "
            + ", ".join(losses)
        )
        lines += [f"    {problem.splitlines()[0][:200]}" for problem in problems]
        lacking = {*theirs.get(name, {}).get("whole", {}).get("entries", ())} - {*whole.get("entries", ())}
        lines += [f"    not in the log here: {', '.join(sorted(lacking))}"] if lacking and not problems else []
    return lines, good


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="scripts whose name has a word of these")
    parser.add_argument("--peer", type=Path, default=ROOT / ".bench" / "trl", help="an environment with TRL")
    parser.add_argument("--keep", type=Path, help="a folder for inputs, outputs and logs, to look at")
    parser.add_argument("--without-trl", action="store_true", help="run ours alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        with redirect_stdout(sys.stderr):
            return run_all(options.child, options.folder, options.peer, options.only)
    with tempfile.TemporaryDirectory(prefix="trl-scripts-") as scratch:
        work = (options.keep or Path(scratch)).resolve()
        if not (work / "models").exists():
            make_inputs(work)
        results = {}
        for package in ("verl.trl",) if options.without_trl else ("verl.trl", "trl"):
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "cache"), "PYTHONPATH": str(ROOT)}
            command = [sys.executable, __file__, str(options.folder.resolve()), "--child", package]
            command += ["--peer", str(options.peer.resolve()), "--only", *options.only]
            with (work / f"{package}.log").open("w") as log:
                subprocess.run(command, cwd=work, env=env, timeout=_SECONDS, stdout=log, stderr=log, check=False)
            results[package] = json.loads((work / f"{package}.json").read_text())
    lines, good = table(results["verl.trl"], results.get("trl", {}))
    print(*lines, sep="\n")
    sys.exit(not good)


if __name__ == "__main__":
    main()
