"""The Ray cluster under a run: the one place that starts or joins it.

A process that can reach a Ray cluster can run code on it. So one that is started here listens on the loopback interface
alone and wants Ray's token, and one that answers without a token is refused unless `RAY_AUTH_MODE=disabled` is set.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import secrets
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from verl._base.durable import staging_of
from verl._host import device
from verl.errors import ClusterError, ConfigError

#: Seconds for a cluster, a rank or a worker to start. One that dies is noticed at once: this ends silent hangs, and
#: leaves time for the imports of many processes on a busy machine.
START_DEADLINE = 300.0
#: Processes of one kind that are started on this machine: so many, or so many for each CPU.
_MANY, _PER_CPU = 64, 8
#: Bytes of an answer that need not go through the object store.
_INLINE = 1 << 20
_lock = threading.Lock()
logger = logging.getLogger(__name__)
#: Addresses of the cluster that this process has checked, and of the one that it started.
_checked, _own = "", ""
#: Directories in which clusters that this process started have their logs and sockets.
_sessions: list[Path] = []


def import_ray() -> Any:
    """Ray.

    Raises:
        ConfigError: it is not installed, or its version is too old for token authentication.
    """
    # Read when it is imported. What a worker writes is not to be left out because another one wrote it, too.
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_DEDUP_LOGS"):
        os.environ.setdefault(name, "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "worker processes take Ray, which is not installed here: pip install 'ray>=2.59'. Without it, train "
            "synchronously in one process or under torchrun"
        ) from error
    if tuple(map(int, ray.__version__.split(".")[:2])) < (2, 59):
        raise ConfigError(f"Ray {ray.__version__} is too old: pip install 'ray>=2.59'")
    return ray


def connect() -> Any:
    """Ray, with this process connected to a cluster: the one it is connected to, else the one at `RAY_ADDRESS`, else
    one that is started on this machine and ends with this process.

    Raises:
        ConfigError: see `import_ray`.
        ClusterError: the cluster does not answer, wants another token, has no authentication, or could not be started.
    """
    global _checked, _own
    with _lock:
        ray = import_ray()
        address = os.environ.get("RAY_ADDRESS") or "local"
        if not ray.is_initialized() and address == "local":
            _start(ray)
            _sessions.append(Path(ray._private.worker.global_worker.node.get_session_dir_path()))
            atexit.register(remove_sessions)
            atexit.register(ray.shutdown)  # before it: the latest comes first
            _own = ray.get_runtime_context().gcs_address
        elif not ray.is_initialized():
            _join(ray, address)
        if (gcs_address := ray.get_runtime_context().gcs_address) not in (_own, _checked):
            check(gcs_address)
            _checked = gcs_address
        return ray


def check_count(count: int, what: str) -> None:
    """Refuse more processes than the machine bears on which a cluster would be started.

    Raises:
        ConfigError: that many.
    """
    cpus = os.cpu_count() or 1
    most = max(_MANY, _PER_CPU * cpus)
    if count > most and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"{count} {what} are more than this machine of {cpus} CPUs bears, at most {most}: ask for fewer, or set "
            "RAY_ADDRESS to a cluster"
        )


def remove_sessions() -> None:
    """Remove what clusters that this process started leave on the disk, once their processes have ended."""
    while _sessions:
        session = _sessions.pop()
        shutil.rmtree(session, ignore_errors=True)
        latest = session.with_name("session_latest")
        if latest.is_symlink() and not latest.exists():
            latest.unlink(missing_ok=True)


def is_own() -> bool:
    """Whether the cluster that this process is connected to was started by it."""
    import ray

    return bool(ray.is_initialized() and ray.get_runtime_context().gcs_address == _own)


def device_variables() -> set[str]:
    """Names of the environment variables that say which devices a process sees: Ray sets them for each worker."""
    from ray._private.accelerators import get_all_accelerator_managers

    known = set()
    for manager in get_all_accelerator_managers():
        with suppress(RuntimeError):  # that of AMD's devices, where another variable of theirs is set
            known.add(manager.get_visible_accelerator_ids_env_var())
    return {name for name in os.environ if name in known or name.endswith("_VISIBLE_DEVICES")}


def check(address: str) -> None:
    """Ask the head of a cluster whether it can be used, before Ray does, which takes long and hides the reason.

    Args:
        address: "HOST:PORT".

    Raises:
        ClusterError: nothing answers there, it has no authentication, or it wants another token.
    """
    sends_none = os.environ.get("RAY_AUTH_MODE") == "disabled"
    token, origin = ("", "RAY_AUTH_MODE=disabled keeps Ray from sending it") if sends_none else _token()
    is_open = _answers(address, "")
    if is_open and not sends_none:
        raise ClusterError(
            f"the Ray cluster at {address} has no authentication: everyone who reaches it can run code on it. Start it "
            "with RAY_AUTH_MODE=token, or set RAY_AUTH_MODE=disabled here if its network is yours alone"
        )
    if not (is_open or _answers(address, token)):
        raise ClusterError(
            f"the Ray cluster at {address} wants a token, and {origin}: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to "
            "a file that holds it (on the cluster's head, `ray get-auth-token` prints it)"
        )


def _start(ray: Any) -> None:
    """Start a cluster that ends with this process.

    Raises:
        ClusterError: it cannot be started, or not in time.
    """
    started: Future[None] = Future()

    def run() -> None:
        try:
            _init(ray)
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(None)
        threading.Event().wait()  # Ray's processes end with the thread that started them

    threading.Thread(target=run, name="verl-ray", daemon=True).start()
    if not wait([started], timeout=START_DEADLINE).done:
        raise ClusterError(
            f"a Ray cluster did not start here within {START_DEADLINE:g} s: "
            "Ray's logs of it are in /tmp/ray/session_latest"
        )
    if (error := started.exception()) is not None:
        raise ClusterError(f"a Ray cluster could not be started here: {' '.join(str(error).split())}") from error


def _init(ray: Any) -> None:
    from ray._private import ray_constants

    _make_token()
    # Ray warns of what is meant here.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    # Ray's one way to have all its processes listen on the loopback interface; they inherit the variable.
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with device.variable(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0"), _devices_of_workers(), _signals_kept():
            ray.init(
                "local",
                logging_level=logging.ERROR,
                include_dashboard=False,
                # Ray's own default, 15, starves its workers as soon as anything else wants the processors.
                _system_config={"max_direct_call_object_size": _INLINE, "worker_niceness": 0},
            )
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the process's signal handlers: Ray's core replaces the one for SIGTERM by its own, which dumps its stack and
    aborts. They are set through libc, since Python sets handlers in the main thread only."""
    if os.name != "posix":
        yield
        return
    libc = ctypes.CDLL(None)
    kept = [(number, ctypes.create_string_buffer(1024)) for number in (signal.SIGINT, signal.SIGTERM)]
    for number, action in kept:
        libc.sigaction(number, None, action)
    try:
        yield
    finally:
        for number, action in kept:
            libc.sigaction(number, action, None)


@contextmanager
def _devices_of_workers() -> Iterator[None]:
    """A cluster that starts here has the GPUs that this process does not use itself. Where it uses all of them, workers
    share them."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    visible = manager.get_current_process_visible_accelerator_ids()
    if visible is None:
        visible = [str(index) for index in range(manager.get_current_node_num_accelerators())]
    used = device.in_use()
    others = [number for index, number in enumerate(visible) if index not in used]
    if len(others) == len(visible):
        yield
        return
    if not others:
        logger.warning("workers share the GPUs of this process, which uses all %d that it sees", len(visible))
        others = visible
    device.initialize()  # what it sees is settled before the variable says something else
    with device.variable(manager.get_visible_accelerator_ids_env_var(), ",".join(others)):
        yield


def _join(ray: Any, address: str) -> None:
    if address.startswith("ray://"):
        raise ClusterError(f"RAY_ADDRESS={address} is of a Ray client: give HOST:PORT of the cluster's head")
    if address != "auto":
        check(address)
    if os.environ.get("RAY_AUTH_MODE") != "disabled":
        from ray._private.authentication.authentication_token_setup import _enable_token_auth

        _enable_token_auth()
    try:
        with _signals_kept():
            ray.init(address, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ClusterError(f"the Ray cluster at RAY_ADDRESS={address} cannot be joined: {why}") from error


def _token() -> tuple[str, str]:
    """The user's token for Ray ("" if none), and a clause about it for error messages.

    Raises:
        ClusterError: other users can read its file.
    """
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip(), "RAY_AUTH_TOKEN is another one"
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & 0o077 and os.name == "posix":
            raise ClusterError(
                f"{file} can be read or changed by others (mode {mode:o}), who can then run code as you on Ray "
                f"clusters. Delete it, so that a new one is made, or `chmod 600 {file}` if you alone use this machine"
            )
        return file.read_text().strip(), f"{file} holds another one"
    except OSError:
        return "", f"there is none here ({file})"


def _make_token() -> None:
    """Make the token of this user's clusters if it is missing, before Ray does, which lets others read it."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled" or _token()[0] or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    file = Path.home() / ".ray" / "auth_token"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    staging = staging_of(file)
    try:
        with open(staging, "x", opener=partial(os.open, mode=0o600)) as opened:
            opened.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was faster
            os.link(staging, file)
    finally:
        staging.unlink(missing_ok=True)


def _answers(address: str, token: str) -> bool:
    """Whether the head of a cluster accepts this token.

    Raises:
        ClusterError: it does not answer.
    """
    import grpc

    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            ask(b"", timeout=5.0, metadata=metadata)
        except grpc.RpcError as error:
            what = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
            if what == grpc.StatusCode.UNAUTHENTICATED.name:
                return False
            raise ClusterError(f"no Ray cluster answers at {address} ({what}): is its head running?") from error
    return True
