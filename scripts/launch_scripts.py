"""Which launch scripts of volcengine/verl `verl train` accepts, and what it says of the others.

    python scripts/launch_scripts.py FOLDER [--verbose] [--keys FILE] [--only WORD] [--run N]

FOLDER is a checkout of that project. Each of its shell scripts runs under bash in an empty folder, with nothing on PATH
but stand-ins that write down how Python was called: no command of the machine is reached, no name is looked up, and
output goes nowhere. The settings of the call are checked as `verl train SETTINGS --dry-run` does, with paths of models
and data replaced by files that are there, and no tracker.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import md5
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
#: A module that trains: its settings are what `verl train` reads.
_LAUNCH = re.compile(r"(?:^|[./])(main_\w+|\w*main|\w*sft_trainer(?:_ray)?)(?:\.py)?$")
_NO_TRAINING = ("main_generation", "main_generation_server", "main_eval")
_SETTING = re.compile(r"[+~]{0,2}([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
_SECONDS = 10
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
    """The calls of trainers that a shell script makes."""
    for words in _calls(script):
        module = next((word for word in words if _LAUNCH.search(word) and "=" not in word), None)
        if module is None or module.rpartition(".")[2] in _NO_TRAINING:
            continue
        settings = [word for word in words[words.index(module) + 1 :] if _SETTING.fullmatch(word)]
        yield Launch(script, module, tuple(settings))


def _calls(script: Path) -> Iterator[list[str]]:
    """The arguments of each call of Python that the script makes."""
    text = re.sub(r"\d?>&\d|&>>?\s*\S+|\d?>>?\s*[^\s(|;&]+", "", script.read_text(errors="replace"))
    text = re.sub(r"/(?:\w+/)*bin/(?=python|torchrun)", "", text)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prelude").write_text(_PRELUDE)
        (Path(folder) / "bin").mkdir()
        variables = {"HOME": "/home/user", "STAND_INS": f"{folder}/bin", "BASH_ENV": f"{folder}/prelude"}
        bash = [shutil.which("bash") or "/bin/bash", "-c", text, str(script)]
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
    present = {
        r"data\.train_files": f"[{folder}/train.parquet]",
        r"data\.val_files": f"[{folder}/val.parquet]",
        r".*model\.(path|tokenizer_path|partial_pretrain)|.*_model_path": f"{folder}/model",
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
            score = f"def {value}(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
            function.write_text(score)
    return changed


def check(launch: Launch, folder: Path) -> Outcome:
    """What `verl train ... --dry-run` says of it."""
    from verl.config import load_config
    from verl.errors import VerlError
    from verl.run.check import check_settings

    try:
        check_settings(load_config(None, local(launch.settings, folder)))
    except VerlError as error:
        return Outcome(launch, tuple(line.strip() for line in str(error).splitlines()))
    return Outcome(launch, ())


def small(settings: Sequence[str]) -> list[str]:
    """The settings for one process on a CPU: as many mini-batches, short texts."""
    values = {match[1]: match[2] for word in settings if (match := _SETTING.fullmatch(word))}
    prompts, mini = (
        int(values.get(key, usual))
        for key, usual in (("data.train_batch_size", 1024), ("actor_rollout_ref.actor.ppo_mini_batch_size", 256))
    )
    parts = max(1, min(4, prompts // mini))
    changed = {
        "data.train_batch_size": parts * 2, "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "data.gen_batch_size": None, "data.max_prompt_length": 64, "data.max_response_length": 8,
        "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1, "rollout.n_gpus_per_node": None, "rollout.nnodes": None,
        "trainer.total_training_steps": 2, "trainer.total_epochs": None, "trainer.device": None,
        "actor_rollout_ref.rollout.name": "embedded", "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.max_model_len": None, "trainer.experiment_name": "small", "trainer.val_only": None,
        "trainer.default_local_dir": "runs", "actor_rollout_ref.rollout.prompt_length": None,
        "actor_rollout_ref.rollout.response_length": None, "critic.ppo_mini_batch_size": None,
    }  # fmt: skip
    of_ranks = r".*(megatron\.\w+_size|strategy|ulysses_\w+|_offload|fsdp_size|forward_prefetch|mixed_precision\.\w+)"
    of_lengths = r".*(overlong_buffer(_cfg)?\.len|max_resp_len)"
    kept = []
    for word in settings:
        key, value = _SETTING.fullmatch(word).groups()  # type: ignore[union-attr]
        if key not in changed and not re.fullmatch(of_ranks, key) and not value.startswith("cuda"):
            kept.append(f"{key}={8 if key.endswith('_len') else 4}" if re.fullmatch(of_lengths, key) else word)
    return [*kept, *(f"{key}={value}" for key, value in changed.items() if value is not None)]


def run_small(launch: Launch, folder: Path) -> str:
    """Two steps of a launch, small: what its settings mean here, and the last line of the run."""
    from verl.config import load_config

    settings = local(launch.settings, folder)
    config = load_config(None, settings)
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    meaning = (
        f"batch {data.batch_size} x {rollout.n}, mini-batch {actor.mini_batch_size}, lr {actor.optim.lr} "
        f"{actor.optim.schedule} after {actor.optim.warmup_steps}, {config.algorithm.name} {config.algorithm.options}"
    )
    reward = [] if config.reward.model or config.reward.path else [f"custom_reward_function.path={folder}/reward.py"]
    command = [sys.executable, "-m", "verl", "train", *small(settings), *reward, "--fresh"]
    with tempfile.TemporaryDirectory() as runs:
        variables = {**os.environ, "PYTHONPATH": str(_ROOT)}
        done = subprocess.run(command, cwd=runs, capture_output=True, text=True, timeout=300, env=variables)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "step 2/2" in line or "error:" in line]
    return f"{meaning}\n    {said[-1] if said else done.stderr[-1500:]}"


def make_local_names(folder: Path) -> None:
    """A tiny model, a row of data in their form, and a function that scores."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    model = [sys.executable, str(_ROOT / "benchmarks" / "made_model.py"), "tiny", str(folder / "model")]
    subprocess.run(model, cwd=_ROOT, check=True, capture_output=True)
    for name, first in (("train", 0), ("val", 8)):
        rows = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{number} + 1 ="}],
                "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
                "extra_info": {"index": number},
            }
            for number in range(first, first + 8)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    score = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    score += "    return float(len(set(solution_str)) % 7)\n"  # which samples of a random model differ in
    (folder / "reward.py").write_text(score)


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
        for launch in sorted(accepted, key=lambda one: md5(one.script.name.encode()).hexdigest())[: options.run]:
            print(f"{launch.script.relative_to(options.folder)}: {run_small(launch, Path(folder))}", flush=True)
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
