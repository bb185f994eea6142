"""Whatever the user's code does wherever it is called, a run goes on without the sample, or ends by name within the
deadline and 10 s; then the same command goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked

#: Seconds of the run's deadlines, and of its rewards.
DEADLINE = 4.0

SCRIPT = '''
import ctypes, json, os, re, sys, time, urllib.request
import torch, verl
from verl.algorithms import make_algorithm
from verl.batch import Batch
from verl.rollout.tools import Tool
from verl.rollout.turns import Turns

place, kind, folder, model = sys.argv[1:]
DEADLINE = {deadline}
calls = 0
#: The third step: episodes are called four times in each.
AT = 9 if place in ("episode", "tool", "agent", "environment") else 3


def fault(here, value=None):
    """What the user's code returns; at call AT of its place, if there is a file "bad", what is wrong."""
    global calls
    calls += here == place
    if here != place or calls != AT or not os.path.exists(f"{{folder}}/bad"):
        return value
    with open(f"{{folder}}/began", "w") as file:
        file.write(str(time.time()))
    return WRONG[kind]()


WRONG = {{
    "sleep": lambda: time.sleep(600),
    "held": lambda: ctypes.PyDLL(None).sleep(600),
    "regex": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
    "raise": lambda: 1 / 0,
    "huge": lambda: "x" * 10**7,
    "exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(3),
}}


def reward(texts):
    return fault("reward", [float(n) for n, _ in enumerate(texts)])

def reward_here(texts):
    return fault("reward_here", [float(n) for n, _ in enumerate(texts)])

def cost(texts):
    return fault("cost", [1.0 for _ in texts])

def metric(samples):
    return fault("metric", 1.0)

def evaluated(samples):
    return fault("evaluation_metric", 1.0)

def node(batch):
    return fault("node", Batch.from_columns({{"note": [1.0] * len(batch)}}))

def hook(step, record):
    fault("hook")

def collate(rows):
    return fault("collator", rows)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return fault("dataset", f"prompt {{index}}")

def draft(x: str) -> str:
    """A tool.

    Args:
        x: a text
    """
    return fault("tool", "fine")

async def episode(client, row):
    fault("episode")
    if place == "tool":
        assert "fine" in (said := await verl.rollout.tools.tool(draft, timeout=1.0).call({{"x": "a"}})), said
    return [Turns().wrote(await client.generate(row["prompt_tokens"]))]

class Environment:
    def reset(self, **row):
        fault("environment")
    def get_reward(self):
        return 1.0

def agent(base_url, api_key, row):
    body = json.dumps({{"model": "any", "messages": [{{"role": "user", "content": "a"}}]}}).encode()
    request = urllib.request.Request(f"{{base_url}}/chat/completions", body,
                                     {{"Authorization": f"Bearer {{api_key}}", "Content-Type": "application/json"}})
    urllib.request.urlopen(request).read()
    return fault("agent", time.time() % 1)

class Mine(type(make_algorithm("grpo"))):
    def compute_loss(self, batch):
        fault("loss")
        return super().compute_loss(batch)
    def prepare(self, batch):
        fault("prepare")
        return super().prepare(batch)


options = dict(algorithm=Mine(), reward=verl.Reward(reward, timeout=1.0, max_failure_rate=1.0), on_log_hook=hook)
if place == "reward_here":
    options["reward"] = verl.Reward(reward_here, timeout=1.0, process=False, max_failure_rate=1.0)
if place == "cost":
    options |= {{"algorithm": "safe_rlhf", "cost": verl.Reward(cost, timeout=1.0, max_failure_rate=1.0)}}
if place == "node":
    noted = verl.dataflow.graph.Node(name="note", run=node, inputs=("response",), outputs=("note",))
    options["nodes"] = {{"note": noted}}
actor_options = {{}}  # deadlines of episodes are well before the run's: an agent is tried twice
if place in ("episode", "tool"):
    episode.deadline = 1.0
    actor_options["episode"] = episode
if place == "agent":
    actor_options["episode"] = verl.Gateway(agent, deadline=1.0, max_left_out=1.0, chat_template="hermes")
if place == "environment":
    actor_options["episode"] = verl.EnvironmentEpisode(Environment, deadline=1.0)
actor = verl.Actor(model, sampling={{"max_new_tokens": 4}}, seed=0, **actor_options)
if place == "evaluation_metric":
    from verl.data.prompts import load_prompts
    from verl.trainer.evaluation import HeldOut
    options["held_out"] = HeldOut(load_prompts(["eval"]), every=1, metrics={{"mine": evaluated}})
trainer = verl.Trainer(actor, n=2, log_dir=folder + "/log", checkpoint_dir=folder + "/checkpoints", save_every=1,
                       deadline=DEADLINE, max_failed_episodes=1.0, **options)
if place == "metric":
    trainer.add_metric("mine", metric)
trainer.resume()
print("from step", trainer.steps, flush=True)
prompts = [["a", "b"]] * 6
if place in ("collator", "dataset"):
    prompts = torch.utils.data.DataLoader(Rows(), batch_size=2, collate_fn=collate)
trainer.fit(prompts, 6 - trainer.steps)
print("trained to step", trainer.steps, flush=True)
'''

#: Where a sample, a number or a line of the log is left out; elsewhere the run ends.
GOES_ON = (
    "reward",
    "reward_here",
    "cost",
    "metric",
    "evaluation_metric",
    "episode",
    "tool",
    "agent",
    "environment",
    "hook",
)
PLACES = (*GOES_ON, "loss", "prepare", "node", "collator", "dataset")
KINDS = ("sleep", "held", "regex", "raise", "huge", "exit")
#: What is wrong there changes nothing: what they return is not read.
NOT_READ = {(place, "huge") for place in ("hook", "loss", "prepare", "episode", "environment")}
#: A metric that gives no number is mistaken from its first call on: it is refused.
REFUSED = {(place, "huge") for place in ("metric", "evaluation_metric")}
#: Quick ones.
DIAGONAL = {
    ("evaluation_metric", "sleep"), ("loss", "held"), ("reward", "exit"), ("episode", "exit"), ("dataset", "raise"),
}  # fmt: skip
CELLS = [(place, kind) for place in PLACES for kind in KINDS] + [("reward", "os._exit")]


def start(folder: Path, tiny: Path, place: str, kind: str) -> subprocess.Popen[str]:
    file = folder / "mine.py"
    file.write_text(SCRIPT.format(deadline=DEADLINE))
    command = [sys.executable, str(file), place, kind, str(folder), str(tiny)]
    return forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder: Path, tiny: Path, place: str, kind: str) -> tuple[int, str]:
    process = start(folder, tiny, place, kind)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


@pytest.mark.parametrize(
    ("place", "kind"),
    [pytest.param(*cell, marks=[] if cell in DIAGONAL else pytest.mark.slow) for cell in CELLS],
)
def test_the_run_goes_on_without_it_or_ends_by_name(tmp_path: Path, tiny: Path, place: str, kind: str) -> None:
    (tmp_path / "bad").touch()
    status, output = run(tmp_path, tiny, place, kind)
    seconds = time.time() - float((tmp_path / "began").read_text())
    # Own processes are killed; what holds the interpreter of the trainer cannot be left behind.
    is_held = kind in ("held", "regex") and place not in ("reward", "cost")
    goes_on = place in GOES_ON and not is_held and (place, kind) not in REFUSED
    if goes_on or (place, kind) in NOT_READ:
        assert status == 0 and "trained to step 6" in output, output[-3000:]
        return
    assert status != 0 and seconds < 2 * DEADLINE + 10, (seconds, output[-3000:])
    assert (status == -signal.SIGKILL) == is_held, output[-3000:]
    assert str(tmp_path / "mine.py") in output or "returned" in output or "node '" in output, output[-3000:]
    if is_held:
        # Of several threads that compute nothing, that of another episode may be named.
        assert (
            "in <lambda>, holds" if place != "agent" else "holds"
        ) + " the interpreter beyond its deadline" in output
    (tmp_path / "bad").unlink()
    status, output = run(tmp_path, tiny, place, kind)
    assert status == 0 and "trained to step 6" in output, output[-3000:]
    assert "from step 0" not in output or place in ("dataset", "collator")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["loss", "metric", "episode", "reward_here"])
@pytest.mark.parametrize("kind", ["held", "sleep"])
def test_sigterm_ends_the_run_meanwhile_and_the_same_command_goes_on(
    tmp_path: Path, tiny: Path, place: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DEADLINE", 60.0)
    (tmp_path / "bad").touch()
    process = start(tmp_path, tiny, place, kind)
    end = time.monotonic() + 120
    while not (tmp_path / "began").exists() and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    time.sleep(4.0)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 12 and process.returncode != 0, output[-3000:]
    (tmp_path / "bad").unlink()
    status, output = run(tmp_path, tiny, place, kind)
    assert status == 0 and "trained to step 6" in output, output[-3000:]
