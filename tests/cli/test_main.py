"""The command line as its user meets it: in a process of its own."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import forked
from verl._host.user_functions import load_function
from verl.cli.main import app
from verl.cli.plan import plan
from verl.config import load_config

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "grpo_arithmetic.yaml"
COMMANDS = (
    "init", "train", "plan", "config", "report", "check", "verify", "export", "doctor", "generate", "eval", "tune",
)  # fmt: skip


def verl(*args, cwd=ROOT, **environment):
    return forked.run(
        [sys.executable, "-m", "verl", *map(str, args)],
        cwd=cwd,
        text=True,
        timeout=120,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "PYTHONPATH": str(ROOT), **environment},
    )


def test_version():
    import verl as package

    result = verl("--version")
    assert (result.returncode, result.stdout) == (0, package.__version__ + "\n")


def test_help_names_every_command():
    result = verl("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_teaches_by_example(command):
    result = verl(command, "--help")
    assert result.returncode == 0
    assert "Examples" in result.stdout
    assert f"$ verl {command}" in result.stdout


@pytest.mark.slow
def test_dry_run_prints_settings_and_plan_and_loads_no_model(tmp_path):
    code = (
        "import sys\nfrom verl.cli.main import app\n"
        f"app(['train', {str(RECIPE)!r}, 'trainer.seed=41', 'trainer.placement=cpu:0', '--dry-run'], "
        "standalone_mode=False)\n"
        "print('heavy:', [name for name in sys.modules if name == 'vllm' or 'auto' not in name"
        " and name.startswith('transformers.models.') and 'modeling_' in name])"
    )
    result = subprocess.run(  # from cold: what it imports is asked for
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "  seed: 41" in result.stdout
    assert "placement         actor\n                cpu:0  0/1\n" in result.stdout
    assert "run directory  runs/grpo-smollm2-135m-instruct-chain_sum-" in result.stdout
    assert "heavy: []" in result.stdout
    first, differs, settings = re.split(r"\n# (?:Not the default|All settings):\n", result.stdout)
    assert "run directory" in first and "  seed: 41" in settings
    assert "trainer.seed: 41  # 0\n" in differs and "trainer.deadline" not in differs
    assert list(tmp_path.iterdir()) == []


def test_a_config_error_is_one_message_and_exit_code_2():
    result = verl("train", RECIPE, "trainer.sed=3")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "trainer.sed: unknown key; did you mean 'trainer.seed'? (override 'trainer.sed=3')" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_dry_run_refuses_a_map_of_placement_that_is_none():
    result = verl("train", RECIPE, "trainer.placement=cpu:0-x", "--dry-run")
    assert result.returncode == 2
    assert "placement: 'cpu:0-x' is no device: write 'cuda:0'" in result.stderr


def test_a_dry_run_refuses_what_the_run_would():
    result = verl("train", RECIPE, "algorithm.kl_coeff=0.1", "--dry-run")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: algorithm 'grpo' has no option 'kl_coeff': did you mean 'kl_coef'?\n"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.eval=null", "trainer.eval_metrics=[]"], "never evaluated"),
        ([], "evaluated before and after, saved"),
        (["trainer.eval_every=5"], "evaluated before and after and every 5 steps"),
    ],
)
def test_the_plan_tells_when_is_evaluated(overrides, said):
    assert said in plan(load_config(RECIPE, ["trainer.eval_every=null", *overrides]))["steps"]


def test_a_dry_run_shows_the_steps_of_its_epochs_and_who_rewards(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n' * 7)
    (tmp_path / "game.py").write_text(
        "class Game:\n    def reset(self, **row):\n        return 'go'\n\n"
        "    def get_reward(self):\n        return 1.0\n"
    )
    result = verl(
        "train", f"data.train={tmp_path / 'train.jsonl'}", "data.batch_size=4", "trainer.total_epochs=3", "--dry-run",
        f"actor_rollout_ref.rollout.environment={tmp_path / 'game.py'}:Game", "actor_rollout_ref.model.path=x",
        "actor_rollout_ref.rollout.n=2",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "steps  6, never evaluated" in result.stdout
    assert "reward  the environment" in result.stdout and "4 prompts x 2 samples = 8 responses" in result.stdout
    epochs = load_config(RECIPE, ["trainer.total_steps=100", "trainer.total_epochs=3"])
    assert "as many as 3 epochs have" in plan(epochs)["steps"]


def test_debug_shows_the_traceback():
    result = verl("train", "nowhere.yaml", LOG_LEVEL="DEBUG")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert result.stderr.rstrip().endswith("nowhere.yaml: no such file")


def test_other_errors_end_with_exit_code_1(tmp_path):
    result = verl("report", tmp_path)
    assert result.returncode == 1
    assert "no run directory" in result.stderr
    assert "Traceback" not in result.stderr


def test_report_prints_the_path(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    result = verl("report", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").is_file()


def test_config_prints_the_documented_settings():
    text = verl("config")
    assert "total_steps: 100" in text.stdout
    assert "# steps; a longer run" in text.stdout
    table = verl("config", "--markdown")
    assert table.stdout.startswith("# Settings\n")


def test_ctrl_c_ends_with_130(tmp_path):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(f"import pathlib, time\npathlib.Path({str(tmp_path / 'here')!r}).touch()\ntime.sleep(300)\n")
    process = forked.Popen(
        [sys.executable, "-m", "verl", "train", RECIPE, "reward.name=null", "reward.answer=whole",
         f"reward.path={rewards}:score", "--dry-run"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not (tmp_path / "here").exists() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # the command is in the middle of importing the user's file
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("arguments", [["config"], ["train", RECIPE, "--dry-run"], ["--help"]])
def test_a_full_disk_behind_the_output_is_named(arguments):
    with open("/dev/full", "w") as full:
        result = forked.run(
            [sys.executable, "-m", "verl", *map(str, arguments)],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=120,
            env={**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == "error: standard output: No space left on device\n"


def test_more_threads_than_cores_are_refused():
    cores = os.cpu_count()
    result = verl("train", RECIPE, "trainer.threads=100000", "--dry-run")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: trainer.threads: must be at most {cores}, the CPU cores here, not 100000\n"


@pytest.mark.timeout(120)
def test_a_pipe_is_not_read_as_data(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("data/a.jsonl", "prompts.txt"):
        os.mkfifo(tmp_path / name)
    trained = verl("train", RECIPE, f"data.train={tmp_path / 'data'}", "--dry-run")
    assert "a.jsonl is not a regular file" in trained.stderr and trained.returncode == 1
    generated = verl("generate", "models/none", tmp_path / "prompts.txt", tmp_path / "out.jsonl")
    assert "prompts.txt cannot be read: it is not a regular file" in generated.stderr and generated.returncode == 1
    os.mkfifo(tmp_path / "metrics.jsonl")
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "summary.json").write_text("{}")
    assert verl("report", tmp_path).returncode in (0, 1)


def test_verify_tells_a_whole_checkpoint_from_a_damaged_one(tmp_path):
    from verl.checkpoint.store import save_checkpoint

    checkpoint = tmp_path / "step-000003"
    assert save_checkpoint(checkpoint, 3, {"trainer.json": {"step": 3}})
    whole = verl("verify", checkpoint)
    assert (whole.returncode, whole.stderr) == (0, "")
    assert "step 3" in whole.stdout
    (checkpoint / "trainer.json").write_bytes(b'{"step": 4}')
    damaged = verl("verify", checkpoint)
    assert damaged.returncode == 1
    assert "trainer.json" in damaged.stderr


def test_check_describes_a_model_and_refuses_what_is_none(tiny, tmp_path):
    result = verl("check", tiny, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["architecture"], found["dtype"], found["problems"]) == ("LlamaForCausalLM", "float32", [])
    none = verl("check", tmp_path)
    assert none.returncode == 1
    assert "is not a model directory" in none.stderr


def test_help_has_no_broken_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    shown = CliRunner().invoke(app, ["eval", "--help"]).stdout
    assert (
        "Accuracy is the share of right answers, by the task's own verifier, or where every reward is 0 or 1." in shown
    )
    examples = [line for line in shown.splitlines() if line.strip().startswith("$ verl eval")]
    assert len(examples) == 4


@pytest.mark.slow
def test_init_writes_a_recipe_that_trains(tiny, tmp_path):
    made = verl("init", "sums", "--model", tiny, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    command = made.stdout.strip().rpartition("next: ")[2]
    directory, _, train = command.partition(" && ")
    where = tmp_path / directory.removeprefix("cd ")
    *program, train, recipe = shlex.split(train)
    assert program == [sys.executable, "-m", "verl"], "as it was called"
    arguments = [train, recipe]
    dry = verl(*arguments, "--dry-run", cwd=where)
    assert dry.returncode == 0, dry.stderr
    few = ("trainer.total_steps=1", "data.batch_size=2", "actor_rollout_ref.rollout.n=2", "data.eval=null")
    few += ("actor_rollout_ref.rollout.max_new_tokens=4", "data.system_prompt=null", "trainer.save_every=null")
    run = verl(*arguments, *few, cwd=where)
    assert run.returncode == 0, run.stderr
    program = str(Path(sys.executable).with_name("verl"))
    env = {**os.environ, "PATH": f"{Path(program).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    other = subprocess.run([program, "init", "two words"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert other.stdout.endswith("next: cd 'two words' && verl train recipe.yaml\n"), other.stderr
    again = verl("init", "sums", cwd=tmp_path)
    assert again.returncode == 2 and "not an empty directory" in again.stderr


def test_what_init_writes_is_small_and_holds_out_what_it_does_not_train(tmp_path):
    """Two CPU cores without bf16 are to show a first step in a minute and a result in five."""
    assert CliRunner().invoke(app, ["init", str(tmp_path / "sums"), "--model", "m"]).exit_code == 0
    config = load_config(tmp_path / "sums" / "recipe.yaml")
    trained, held_out = (
        [json.loads(line) for line in (tmp_path / "sums" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    )
    prompts = [row["prompt"] for row in (*trained, *held_out)]
    assert len({*prompts}) == len(prompts) == 400
    assert all(sum(map(int, re.findall(r"\d+", row["prompt"]))) == row["answer"] for row in trained)
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    tokens = rollout.max_new_tokens * (rollout.n * config.data.batch_size * trainer.total_steps + 2 * len(held_out))
    assert tokens <= 15_000 and trainer.eval_every is None
    score = load_function(f"{tmp_path}/sums/rewards.py:correct")
    assert score(["18", "3 + 15 = 18.", "It is 17", "none"], [], [18] * 4) == [1.0, 1.0, 0.0, 0.0]


TASKS = """
actor_rollout_ref: {model: {path: a/model}, rollout: {max_new_tokens: 32}}
data:
  train: {sums: {task: chain_sum, size: 100}, others: {task: chain_sum, size: 50}}
  batch_size: 8
tasks:
  - {name: sums, type: grpo, n: 4, reward_model: task, share: 3}
  - {name: others, type: rloo, reward_model: {one: {source: task, weight: 2.0}}, options: {kl_in: loss}}
"""


@pytest.fixture
def tasks(tmp_path):
    (tmp_path / "tasks.yaml").write_text(TASKS)
    return tmp_path / "tasks.yaml"


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["plan"]])
def test_what_several_tasks_would_do_is_told_by_task(tasks, command):
    result = verl(command[0], tasks, *command[1:])
    assert result.returncode == 0, result.stderr
    lines = {line[:14].strip(): line[16:] for line in result.stdout.splitlines()[:9]}
    assert lines["task sums"] == "grpo 75% of the prompts reward_model=task n=4"
    assert lines["task others"].startswith("rloo 25% of the prompts options={'kl_in': 'loss'} reward_model=")
    assert lines["data"] == "sums: chain_sum size=100, others: chain_sum size=50; held out: none"
    assert "recorded groups (a pair" not in result.stdout and not {"algorithm", "reward"} & lines.keys()
    if command[0] == "train":
        assert (
            '\ntasks: [{"name": "sums", "type": "grpo", "reward_model": "task", "share": 3.0, "n": 4}, '
            in result.stdout
        )


def test_a_sum_of_rewards_is_told(tmp_path):
    recipe = tmp_path / "sum.yaml"
    recipe.write_text(
        "actor_rollout_ref: {model: {path: a/model}}\ndata: {train: {task: chain_sum, size: 9}}\n"
        "reward: {components: {right: {name: task}, again: {name: task, weight: 0.5}}}\nalgorithm: {name: grpo}\n"
    )
    result = verl("train", recipe, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert 'reward.components: {"right": {"name": "task"}, "again": {"name": "task", "weight": 0.5}}' in result.stdout


def test_a_placement_for_several_tasks_is_refused_by_name(tasks):
    result = verl("plan", tasks, "--cluster", "8xA100")
    assert result.returncode == 2 and "several tasks are not modelled" in result.stderr
