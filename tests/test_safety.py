"""Nothing that comes from a socket is unpickled or executed, and no code of the package listens on one.

The package's source is searched for every call that could; those that are allowed are listed with their reasons. A
running job on Ray shows that the libraries under it listen on the loopback interface alone.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package import modules
from tests.ranks import ENV
from tests.sockets import LOOPBACK, family, listeners

#: Ends of the full names of functions and classes that unpickle or execute.
EXECUTES = (
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "pandas.read_pickle"),
    *("dill.load", "dill.loads", "joblib.load", "marshal.load", "marshal.loads", "shelve.open", "torch.jit.load"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.UnsafeLoader", "torch.load"),
    *("recv_object_list", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("builtins.eval", "builtins.exec", "os.system", "os.popen"),
)
#: The same of what opens a listening socket, or makes a library open one.
LISTENS = (
    *("bind", "listen", "create_server", "create_unix_server", "start_server", "start_unix_server"),
    *("serve_forever", "HTTPServer", "ThreadingHTTPServer", "TCPServer", "UDPServer", "create_datagram_endpoint"),
    *("connection.Listener", "SyncManager", "BaseManager", "add_insecure_port", "add_secure_port", "init_rpc"),
    *("grpc.server", "uvicorn.run", "web.run_app", "TCPStore"),
)
#: Settings that make a call harmless.
HARMLESS = {"torch.load": ("weights_only", True)}

ALLOWED = {
    ("batch.py", "_unpickled", "pickle.loads"): "is part of a batch's pickle, which only Ray makes and reads",
    ("_base/checked.py", "_evaluated", "builtins.eval"): "an annotation of the package's own source",
    ("_base/checked.py", "call", "bind"): "arguments to a signature: no socket",
    ("cluster/ray/rank.py", "_portable", "pickle.loads"): "what the same line has just pickled",
    ("cluster/ray/rank.py", "stream", "pickle.loads"): "arguments of an actor's call, pickled once for several ranks",
    ("rewards/processes.py", "_serve", "pickle.loads"): "a call, from the process that forked this one, over a pipe",
    ("rewards/processes.py", "_serve_async", "pickle.loads"): "the same",
    ("workers/scorer.py", "load", "cloudpickle.loads"): "the user's reward, sent by the driver through Ray",
    ("cluster/torchrun/meeting.py", "meet", "TCPStore"): "the store of torchrun's ranks, where torch would make it",
    ("cluster/ray/rank.py", "open_store", "TCPStore"): "torch's store; a test lists the addresses below",
    ("cluster/ray/rank.py", "open_store", "bind"): "the socket of torch's store",
    ("cluster/ray/rank.py", "join", "TCPStore"): "a client of that store",
    ("cli/doctor.py", "check_collective", "bind"): "a port number for torchrun; it never listens",
    ("rollout/gateway/server.py", "start", "create_server"): "agents, on loopback, while they run, each with a key",
    ("rollout/gateway/server.py", "serving", "create_server"): "the same, on the socket of a sandbox's own network",
    ("rollout/environments.py", "as_episode", "bind"): "the arguments of a signature",
    ("trainer/trainer.py", "_make_tasks", "bind"): "a task to its actor",
    ("sandbox/run_tests.py", "run_program", "builtins.exec"): "a program, in a process of the sandbox",
    ("sandbox/run_tests.py", "units", "builtins.exec"): "its tests, in a process of a sandbox",
    ("sandbox/run_tests.py", "fault_of", "builtins.exec"): "what they import, as above",
    ("sandbox/run_tests.py", "__missing__", "builtins.eval"): "the name of what they are of, as above",
    ("sandbox/jail.py", "open_network", "create_server"): "that socket, in a network that has the sandbox alone",
    ("sandbox/jail.py", "run", "builtins.exec"): "a program, in a process of the sandbox",
}


def full_names(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for, anywhere in a file."""
    found = {"eval": "builtins.eval", "exec": "builtins.exec"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom):
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """The full name of an expression; "?" stands for what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def suspects(tree: ast.Module, ends: tuple[str, ...] = (*EXECUTES, *LISTENS)) -> set[tuple[str, str]]:
    """What a file reads of names that end so, with the function around it: what is called, and what is handed on."""
    names, found = full_names(tree), set()

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and is_harmless(node, dotted(node.func, names)):
            node = ast.Tuple([*node.args, *(keyword.value for keyword in node.keywords)], ast.Load())
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = f".{dotted(node, names)}"
            found.update((function, end) for end in ends if name.endswith(f".{end}"))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "")
    return found


def is_harmless(call: ast.Call, name: str) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    setting, value = HARMLESS.get(name, ("", None))
    found = given.get(setting)
    return isinstance(found, ast.Constant) and found.value is value


def test_the_package_neither_unpickles_nor_executes_nor_listens_beyond_a_short_list() -> None:
    found = set()
    for where, (_, tree) in modules().items():
        for function, name in suspects(tree):
            found.add((where, function, name))
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle; pickle.loads(x)",
        "from pickle import loads as read; read(x)",
        "import ray; ray.cloudpickle.loads(x)",
        "import torch; torch.load(file)",
        "import torch as t; t.load(file, weights_only=False)",
        "from torch import distributed as d; d.broadcast_object_list(x)",
        "import torch.distributed as dist; dist.all_gather_object(x, y)",
        "import marshal; map(marshal.loads, x)",
        "import yaml; yaml.load(x, yaml.Loader)",
        "eval(x)",
        "exec(x)",
        "sock.listen()",
        "sock.bind(x)",
        "import socket; socket.create_server(x)",
        "import asyncio; asyncio.start_server(x)",
        "from http.server import ThreadingHTTPServer; ThreadingHTTPServer(x, y)",
        "from http import server; server.HTTPServer(x, y)",
        "from multiprocessing.connection import Listener; Listener(x)",
        "from torch.distributed import TCPStore; TCPStore(x)",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert suspects(ast.parse(line))


@pytest.mark.parametrize(
    "line", ["model.eval()", "import json; json.loads(x)", "import torch; torch.load(x, weights_only=True)"]
)
def test_the_search_passes(line: str) -> None:
    assert not suspects(ast.parse(line))


RAY_JOB = """
import sys, verl
def lengths(responses):
    return [float(len(text)) for text in responses]
if __name__ == "__main__":
    actor = verl.Actor(sys.argv[1], sampling={"max_new_tokens": 2}, placement="cpu:0-1")
    reward = verl.Reward(lengths, workers=1)
    sequences = actor.generate_sequences(["a", "b"])
    actor.update(sequences, reward.get_reward(sequences))
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_running_job_on_ray_listens_on_the_loopback_interface_alone(tiny: Path, tmp_path: Path) -> None:
    """The driver, Ray's own processes and its workers, among them two devices and a worker of the reward."""
    script = tmp_path / "script.py"
    script.write_text(RAY_JOB)
    command = [sys.executable, str(script), str(tiny)]
    env = {name: value for name, value in ENV.items() if name != "RAY_ADDRESS"}
    job = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert job.stdout is not None and job.stdin is not None
    up = job.stdout.readline()
    processes = family(job.pid)
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes if Path(f"/proc/{pid}").exists()}
    own = [pid for pid, line in lines.items() if line.startswith((b"ray::RayRank", b"ray::Scorer"))]
    found, theirs = listeners(processes), listeners(own)
    _, errors = job.communicate(timeout=100)
    assert up == "up\n" and job.returncode == 0, errors[-3000:]
    assert len(own) == 3, lines
    assert theirs and found <= LOOPBACK
