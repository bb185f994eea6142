"""Which launch scripts of volcengine/verl `verl train` accepts, and what it says of the others.

    python scripts/launch_scripts.py FOLDER [--verbose] [--keys FILE] [--only WORD] [--run N]

FOLDER is a checkout of that project. Each of its shell scripts runs under bash in an empty folder, with nothing on PATH
but stand-ins that write down how Python was called: no command of the machine is reached, no name is looked up, and
output goes nowhere. The settings of the call are checked as `verl train SETTINGS --dry-run` does, with paths of models
and data replaced by files that are there, and no tracker.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import md5
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
MADE_MODEL = _ROOT / "benchmarks" / "made_model.py"
#: A module that trains: its settings are what `verl train` reads.
_LAUNCH = re.compile(r"(?:^|[./])(main_\w+|\w*main|\w*sft_trainer(?:_ray)?)(?:\.py)?$")
_NO_TRAINING = ("main_generation", "main_generation_server", "main_eval")
#: Folders of trainers whose loss is in their code, and in no setting.
_OWN_LOSS = ("sppo", "spin", "flowrl", "vla")
#: Settings of a script that learns from images, whose rows `verl train` refuses when it reads them.
_IMAGES = re.compile(r"data\.image_key=|freeze_vision_tower=|/geo3k/|-VL-")
#: For a script that asks for some: processes of a node, and where to save.
_ARGUMENTS = ("2", "saved")
_SETTING = re.compile(r"[+~]{0,2}([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
_SECONDS = 10
#: A reward in which samples of a random model differ.
_SCORE = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(set(solution_str)) % 7)
"""
#: A template that ends each message, as those of models for chats do.
_CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_ACTOR = "actor_rollout_ref.actor"
#: What bash reads first: a script neither leaves its folder nor stops at what a stand-in does not answer.
_PRELUDE = r"""
PATH="$STAND_INS"; exec 9>"$STAND_INS.calls"
cd() { :; }; pushd() { :; }; popd() { :; }; source() { :; }; .() { :; }; exec() { "$@"; }; sudo() { "$@"; }
set() { :; }; ulimit() { :; }; kill() { :; }; sleep() { :; }; wait() { :; }; nohup() { "$@"; }; env() { :; }
ray() { case " $* " in *" -- "*) while [ "$1" != -- ]; do shift; done; shift; "$@";; esac; }
command() { :; }; date() { echo now; }; tee() { :; }; nproc() { echo 8; }; hostname() { echo host; }
basename() { local name="${1##*/}"; echo "${name%"$2"}"; }; dirname() { echo "${1%/*}"; }; pwd() { echo "$PWD"; }
awk() { echo 1; }; expr() { echo 1; }; bc() { echo 1; }; seq() { echo 1; }; wc() { echo 1; }
python3() { printf 'CALL\0' >&9; printf '%s\0' "$@" >&9; printf 'END\0' >&9; }
python() { python3 "$@"; }; torchrun() { python3 -m torchrun "$@"; }; accelerate() { python3 "$@"; }
command_not_found_handle() { return 0; }
"""


@dataclass(frozen=True)
class Launch:
    """A call of a trainer in a script.

    Attributes:
        module: what Python ran, such as `verl.trainer.main_ppo`.
        settings: `key=value`, in their order.
    """

    script: Path
    module: str
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What `verl train` says of a launch; `refusals` is empty where it is accepted."""

    launch: Launch
    refusals: tuple[str, ...]


def launches(script: Path) -> Iterator[Launch]:
    """The calls of trainers that a shell script makes; one that makes none without arguments gets some."""
    for words in next(filter(None, (list(_calls(script, *arguments)) for arguments in ((), _ARGUMENTS))), []):
        module = next((word for word in words if _LAUNCH.search(word) and "=" not in word), None)
        if module is None or module.rpartition(".")[2] in _NO_TRAINING:
            continue
        settings = [word for word in words[words.index(module) + 1 :] if _SETTING.fullmatch(word)]
        yield Launch(script, module, tuple(settings))


def _calls(script: Path, *arguments: str) -> Iterator[list[str]]:
    """The arguments of each call of Python that the script, called with `arguments`, makes."""
    text = re.sub(r"\d?>&\d|&>>?\s*\S+|\d?>>?\s*[^\s(|;&]+", "", script.read_text(errors="replace"))
    text = re.sub(r"/(?:\w+/)*bin/(?=python|torchrun)", "", text)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prelude").write_text(_PRELUDE)
        (Path(folder) / "bin").mkdir()
        variables = {"HOME": "/home/user", "STAND_INS": f"{folder}/bin", "BASH_ENV": f"{folder}/prelude"}
        bash = [shutil.which("bash") or "/bin/bash", "-c", text, str(script), *arguments]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                bash, cwd=f"{folder}/bin", env=variables, timeout=_SECONDS,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        calls = Path(folder) / "bin.calls"
        parts = calls.read_text().split("CALL\0")[1:] if calls.exists() else []
    for part in parts:
        yield part.partition("END\0")[0].split("\0")[:-1]


def local(settings: Sequence[str], folder: Path) -> list[str]:
    """The settings, with models, data and functions of rewards that are there."""
    kind = "prompts" if "model.partial_pretrain" not in " ".join(settings) else "demonstrations"
    kind = "chats" if "data.multiturn.enable=true" in settings else kind
    present = {
        r"data\.train_files": f"[{folder}/{kind}-train.parquet]",
        r"data\.val_files": f"[{folder}/{kind}-val.parquet]",
        r"reward_model\.model\.path": f"{folder}/scorer",
        r".*model\.(path|tokenizer_path|partial_pretrain|input_tokenizer)|.*_model_path": f"{folder}/model",
        r".*reward_function\.path": f"{folder}/reward.py",
        r"trainer\.logger": "console",  # trackers are installed where they are used
    }
    changed = []
    for setting in settings:
        key, value = _SETTING.fullmatch(setting).groups()  # type: ignore[union-attr]
        name = next((name for pattern, name in present.items() if re.fullmatch(pattern, key)), None)
        changed.append(setting if name is None or value in ("", "null", "None") else f"{key}={name}")
        if key.endswith("reward_function.name"):
            function = folder / f"reward_{value}.py"  # a module is imported once
            changed = [other.replace(f"{folder}/reward.py", str(function)) for other in changed]
            function.write_text(_SCORE.replace("compute_score", value))
    return changed


def check(launch: Launch, folder: Path) -> Outcome:
    """What `verl train ... --dry-run` says of it."""
    from verl.config import load_config
    from verl.errors import VerlError
    from verl.run.build import check_settings

    if own := next((name for name in _OWN_LOSS if f"{name}." in launch.module), None):
        return Outcome(
            launch, (f"{launch.module}: the loss of {own} is in its trainer: write an algorithm of your own",)
        )
    refusals: list[str] = []
    try:
        check_settings(load_config(None, local(launch.settings, folder)))
    except VerlError as error:
        refusals = [line.strip() for line in str(error).splitlines()]
    images = next((word for word in launch.settings if _IMAGES.search(word)), None)
    if images and not any("text alone" in line for line in refusals):
        refusals.append(f"{images}: models are of text alone here: there is nothing to write instead")
    return Outcome(launch, tuple(refusals))


def small(settings: Sequence[str]) -> list[str]:
    """The settings for one process on a CPU: short texts, batches of a few mini-batches, each of two prompts."""
    values = {match[1]: match[2] for word in settings if (match := _SETTING.fullmatch(word))}
    parts = min(4, means(settings).updates // int(values.get(f"{_ACTOR}.ppo_epochs", 1)))
    changed: dict[str, object] = {
        "data.train_batch_size": parts * 2, f"{_ACTOR}.ppo_mini_batch_size": 2,
        "data.gen_batch_size": None, "data.max_prompt_length": 64, "data.max_response_length": 8,
        "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1, "rollout.n_gpus_per_node": None, "rollout.nnodes": None,
        "trainer.total_training_steps": 2, "trainer.total_epochs": None, "trainer.device": None,
        "actor_rollout_ref.rollout.name": "embedded", "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.max_model_len": None, "trainer.experiment_name": "small", "trainer.val_only": None,
        "trainer.default_local_dir": "runs", "actor_rollout_ref.rollout.prompt_length": None,
        "actor_rollout_ref.rollout.response_length": None, "critic.ppo_mini_batch_size": None,
    }  # fmt: skip
    if "rollout.total_rollout_steps" in values:
        changed |= {
            "data.train_batch_size": 0, "async_training.trigger_parameter_sync_step": 2,
            "async_training.require_batches": 2, "rollout.total_rollout_steps": 16, "rollout.total_epochs": None,
            "trainer.total_training_steps": None,
        }  # fmt: skip
    if "model.partial_pretrain" in values:  # two batches are all rows
        changed = {
            "data.train_batch_size": 4, "data.max_length": None, "trainer.total_epochs": 1, "trainer.device": None,
            "trainer.experiment_name": "small", "trainer.default_local_dir": "runs",
        }  # fmt: skip
    of_ranks = r".*(megatron\.\w+_size|strategy|ulysses_\w+|_offload|fsdp_size|forward_prefetch|mixed_precision\.\w+)"
    of_lengths = r".*(overlong_buffer(_cfg)?\.len|max_resp_len)"
    kept = []
    for word in settings:
        key, value = _SETTING.fullmatch(word).groups()  # type: ignore[union-attr]
        if key not in changed and not re.fullmatch(of_ranks, key) and not value.startswith("cuda"):
            kept.append(f"{key}={8 if key.endswith('_len') else 4}" if re.fullmatch(of_lengths, key) else word)
    return [*kept, *(f"{key}={value}" for key, value in changed.items() if value is not None)]


@dataclass(frozen=True)
class Meaning:
    """What settings mean, by their source.

    Attributes:
        samples: of a step.
        updates: optimizer steps of a step.
        rates: learning rates of the first two steps, each the mean over its updates. A warm-up rises from update to
            update, does not begin with 0, and ends with the step that the settings name.
        loss: advantages, loss, its bounds, how it is put together, and where the KL counts.
    """

    samples: int
    updates: int
    rates: tuple[float, ...]
    loss: str

    def is_as(self, other: Meaning) -> bool:
        """Whether both mean the same; of rates, to rounding."""
        return replace(self, rates=other.rates) == other and all(map(math.isclose, self.rates, other.rates))


def means(settings: Sequence[str]) -> Meaning:
    """What settings mean, read as the source of volcengine/verl reads them, with the defaults of its YAML."""
    values = {match[1]: match[2] for word in settings if (match := _SETTING.fullmatch(word))}

    def get(key: str, usual: Any) -> Any:
        value = values.get(key, "null")
        if value in ("null", "None", ""):
            return usual
        return value.lower() == "true" if isinstance(usual, bool) else type(usual)(value)

    if "model.partial_pretrain" in values:  # 8 rows; a cosine from its first update on, as a tenth of two is none
        lr = get("optim.lr", 1e-5)
        return Meaning(get("data.train_batch_size", 256), 1, (lr, lr / 2), "likelihood")
    prompts, n = get("data.train_batch_size", 1024), get("actor_rollout_ref.rollout.n", 1)
    if not get("algorithm.filter_groups.enable", False):
        prompts = get("data.gen_batch_size", prompts)
    mini, batches = get(f"{_ACTOR}.ppo_mini_batch_size", 256), 1
    if "rollout.total_rollout_steps" in values:
        batches = get("async_training.trigger_parameter_sync_step", 4)
        prompts = mini * get("async_training.require_batches", 1)
    updates = max(1, prompts // mini) * get(f"{_ACTOR}.ppo_epochs", 1)
    warmup = max(0, get(f"{_ACTOR}.optim.lr_warmup_steps", -1))
    lr = get(f"{_ACTOR}.optim.lr", 1e-6)
    risen = [min(1.0, update / (warmup * updates or 1)) for update in range(1, 2 * updates * batches + 1)]
    updates *= batches
    rates = tuple(lr * sum(part) / updates for part in (risen[:updates], risen[updates:]))
    return Meaning(prompts * batches * n, updates, rates, _loss(get))


def _loss(get: Callable[[str, Any], Any]) -> str:
    estimator, mode = get("algorithm.adv_estimator", "gae"), get(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    clip = get(f"{_ACTOR}.clip_ratio", 0.2)
    low, high = (get(f"{_ACTOR}.clip_ratio_{side}", clip) for side in ("low", "high"))
    kl = "no KL"
    if get(f"{_ACTOR}.use_kl_loss", False):
        kl = f"KL {get(f'{_ACTOR}.kl_loss_coef', 0.001)} in the loss"
    elif get("algorithm.use_kl_in_reward", False):
        kl = f"KL {get('algorithm.kl_ctrl.kl_coef', 0.001)} in the reward"
    entropy = get(f"{_ACTOR}.entropy_coeff", 0.0)
    together = "its own" if mode in ("gspo", "geo_mean", "sapo") else get(f"{_ACTOR}.loss_agg_mode", "token-mean")
    return f"{estimator} {mode} [{low}, {high}] {together}, {kl}, entropy {entropy}"


def does(run: Path) -> Meaning:
    """What a run of two steps did, by the settings and the log that it wrote."""
    import pyarrow.parquet as pq

    from verl.algorithms import make_algorithm
    from verl.config import load_config

    config = load_config(run / "config.yaml")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss/actor" in record]
    options = config.algorithm.options
    tables = sorted((run / "completions").glob("train-*.parquet"))
    assert len(steps) == 2 and all(math.isfinite(step["loss/actor"]) for step in steps), steps
    samples = {pq.read_metadata(table).num_rows for table in tables} or {config.data.batch_size}
    updates = {step["update/steps/actor"] for step in steps}
    assert len(samples) == len(updates) == 1, (samples, updates)
    rates = tuple(step["lr/actor"] for step in steps)
    algorithm = make_algorithm(config.algorithm.name, **options)
    if not algorithm.online:
        return Meaning(samples.pop(), int(updates.pop()), rates, "likelihood")
    low, high = algorithm.clip_bounds
    names = {
        "ppo": "gae vanilla",
        "gspo": "grpo gspo",
        "gmpo": "grpo geo_mean",
        "cispo": "grpo cispo",
        "sapo": "grpo sapo",
        "dapo": "grpo vanilla",
    }
    name = names.get(config.algorithm.name, f"{config.algorithm.name} vanilla")
    together = "its own" if config.algorithm.name in ("gspo", "gmpo", "sapo") else algorithm.loss_agg_mode
    kl = "no KL" if algorithm.kl_in == "none" else f"KL {algorithm.kl_coef} in the {algorithm.kl_in}"
    loss = f"{name} [{low}, {high}] {together}, {kl}, entropy {float(algorithm.entropy_coeff)}"
    return Meaning(samples.pop(), int(updates.pop()), rates, loss)


def run_small(launch: Launch, folder: Path) -> tuple[Meaning, Meaning]:
    """Two steps of a launch, small: what its settings mean, and what the run did.

    Raises:
        RuntimeError: the run failed.
    """
    settings = small(local(launch.settings, folder))
    names = {_SETTING.fullmatch(word)[1] for word in settings}  # type: ignore[index]
    scored = names & {"custom_reward_function.path", "model.partial_pretrain"} or "reward_model.enable=True" in settings
    reward = [] if scored else [f"custom_reward_function.path={folder}/reward.py"]
    command = [sys.executable, "-m", "verl", "train", *settings, *reward, "--fresh"]
    with tempfile.TemporaryDirectory() as runs:
        variables = {**os.environ, "PYTHONPATH": str(_ROOT)}
        done = subprocess.run(command, cwd=runs, capture_output=True, text=True, timeout=300, env=variables)
        if done.returncode:
            raise RuntimeError(f"{launch.script}: {done.stderr[-3000:]}")
        return means(settings), does(Path(runs) / "runs" / "latest")


def drawn(launches: Sequence[Launch], folder: Path) -> list[Launch]:
    """In the order of a hash of their paths."""
    return sorted(launches, key=lambda one: md5(str(one.script.relative_to(folder)).encode()).hexdigest())


def make_local_names(folder: Path) -> None:
    """A tiny model, one that scores, data in their three forms, and a function that scores."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    if not (folder / "model").exists():
        model = [sys.executable, str(MADE_MODEL), "tiny", str(folder / "model")]
        subprocess.run(model, cwd=_ROOT, check=True, capture_output=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = _CHAT
    sizes = AutoConfig.from_pretrained(folder / "model", num_labels=1, pad_token_id=tokenizer.pad_token_id)
    AutoModelForSequenceClassification.from_config(sizes).save_pretrained(folder / "scorer")
    for name in ("model", "scorer"):
        tokenizer.save_pretrained(folder / name)
    for name, first in (("train", 0), ("val", 8)):
        rows: dict[str, list[dict[str, Any]]] = {"prompts": [], "demonstrations": [], "chats": []}
        for number in range(first, first + 8):
            question, answer = f"{number} + 1 =", str(number + 1)
            chat = [{"role": "user", "content": question}]
            about = {"extra_info": {"index": number, "question": question, "answer": answer}}
            scored = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": answer}}
            rows["prompts"].append({"prompt": chat, **scored, **about})
            rows["demonstrations"].append({"prompt": question, "response": answer, **about})
            rows["chats"].append({"messages": [*chat, {"role": "assistant", "content": answer}]})
        for kind, of_kind in rows.items():
            pq.write_table(pa.Table.from_pylist(of_kind), folder / f"{kind}-{name}.parquet")
    (folder / "reward.py").write_text(_SCORE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verbose", action="store_true", help="every script, with each refusal")
    parser.add_argument("--keys", type=Path, help="write the keys, with how many scripts have each")
    parser.add_argument("--only", default="", help="scripts whose path has this word")
    parser.add_argument("--run", type=int, default=0, help="two steps of so many accepted ones, drawn by hash, small")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    scripts = [script for script in sorted(options.folder.rglob("*.sh")) if options.only in str(script)]
    calls = [next(iter(launches(script)), None) for script in scripts]
    first = [call for call in calls if call is not None]
    if options.keys:
        counts = Counter(key for call in first for key in {_SETTING.fullmatch(word)[1] for word in call.settings})  # type: ignore[index]
        options.keys.write_text("".join(f"{key} {count}\n" for key, count in sorted(counts.items())))
    with tempfile.TemporaryDirectory() as folder:
        make_local_names(Path(folder))
        outcomes = [check(call, Path(folder)) for call in first]
        accepted = [outcome.launch for outcome in outcomes if not outcome.refusals]
        for launch in drawn(accepted, options.folder)[: options.run]:
            meaning, deed = run_small(launch, Path(folder))
            verdict = "as its settings say" if deed.is_as(meaning) else f"MEANS {meaning}"
            print(f"{launch.script.relative_to(options.folder)}: {deed}, {verdict}", flush=True)
    reasons = Counter(re.sub(r" \(override '.*?'\)", "", line) for outcome in outcomes for line in outcome.refusals)
    if options.verbose:
        for outcome in outcomes:
            verdict = "\n    ".join(outcome.refusals) or "accepted"
            print(f"{outcome.launch.script.relative_to(options.folder)}: {verdict}")
    for reason, count in reasons.most_common():
        print(f"{count:4}  {reason}")
    print(f"accepted {len(accepted)} of {len(outcomes)} launch scripts ({len(scripts)} shell scripts)")


if __name__ == "__main__":
    main()
