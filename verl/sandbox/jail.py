"""The inside of the sandbox: started by `run.py` as `python -I -S jail.py JOB_FD REPORT_FD` with an empty environment.

Four processes, each the parent of the next: one that stays outside and maps the user, one that makes the namespaces,
the init of the new process namespace, and the program. When init ends the kernel kills everything else inside before
the processes outside can end. Imports the standard library alone.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import linecache
import os
import platform
import resource
import signal
import struct
import sys
import time
import traceback
import types

TYPE_CHECKING = False  # typing itself would take longer to load than all the rest
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_SET_SECCOMP = 1, 38, 24, 22
CLONE_NEW = {"mount": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000, "pid": 0x20000000,
             "network": 0x40000000}  # fmt: skip
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
MNT_DETACH, AT_RECURSIVE, AT_FDCWD = 2, 0x8000, -100
MOUNT_SETATTR = 442
# A program may send signals to an init of the same user. Blocked ones have no effect, and the kernel drops all others
# that would end it. To end a sandbox, its parent is signalled, which the program cannot see.
BLOCKED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
INSIDE = 1000
#: Calls that a program may be deep in: more than Python's 1,000, as those have who write for judges.
RECURSION = 4000
# The user of a sandbox that root starts: the kernel exempts root from the limit on processes.
NOBODY = 65534
#: Numbers of the ABI and of system calls, by machine. Denied: namespaces, kernel objects that no limit counts (memory
#: files, System V and POSIX queues), other processes, and what programs do not need.
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SOCKET, CLONE, CLONE3, PIVOT_ROOT, FCNTL, FLOCK = {
    "x86_64": (41, 56, 435, 155, 72, 73), "aarch64": (198, 220, 435, 41, 25, 32)
}.get(platform.machine(), (0, 0, 0, 0, 0, 0))  # fmt: skip
#: Of fcntl, what reaches files of the host although they are read-only: leases and notices, which are denied, and
#: locks. A program's locks are granted, and hold nothing, as SQLite needs some answer; a command may lock records.
SETLEASE, NOTIFY, LOCKS = 1024, 1026, (6, 7, 37, 38)
DENIED = {
    "x86_64": (29, 64, 68, 101, 135, 155, 161, 165, 166, 175, 240, 246, 248, 249, 250, 253, 272, 294, 298, 300, 303,
               304, 308, 310, 311, 313, 319, 321, 323),
    "aarch64": (26, 39, 40, 41, 51, 92, 97, 104, 105, 117, 180, 186, 190, 194, 217, 218, 219, 241, 262, 264, 265, 268,
                270, 271, 273, 279, 280, 282),
}  # fmt: skip
DENIED_ANYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447, 467)

libc = ctypes.CDLL(None, use_errno=True)


class RefusedError(Exception):
    """A means of isolation is missing."""


def check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise RefusedError(f"{what}: {os.strerror(error)}")


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    check(libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]), f"mount {kind or source or 'private'}")


def die_with_parent(parent: int | None = None) -> None:
    """End with the parent; at once, where that is no longer the process `parent`."""
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if parent not in (None, os.getppid()):
        os._exit(1)


def main() -> None:
    job_fd, report_fd = map(int, sys.argv[1:])
    with os.fdopen(job_fd) as file:
        job = json.load(file)
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    unshared, notify = os.pipe()
    mapped, go = os.pipe()
    child = os.fork()
    if child:
        os.close(notify)
        if os.read(unshared, 1):
            map_users(child)
            os.write(go, b".")
        os.waitpid(child, 0)
        os._exit(0)
    try:
        check(libc.unshare(sum(CLONE_NEW.values())), "new namespaces")
        die_with_parent()
        os.write(notify, b".")
        if not os.read(mapped, 1):
            raise RefusedError("user map: not written")
        init = os.fork()
        if init:
            signal.sigwait({signal.SIGTERM, signal.SIGCHLD})  # a request to end, or init has ended
            os.kill(init, signal.SIGKILL)
            os.waitpid(init, 0)  # all inside is gone
            os._exit(0)
        for fd in (unshared, notify, mapped, go):
            os.close(fd)
        die_with_parent()
        furnish(job)
        if "port" in job:
            open_network(job["port"], job["fd"])
        report(report_fd, {"began": True})
        program = os.fork()
        if program:
            report(report_fd, oversee(program, job["seconds"]))
            os._exit(0)
        os.close(report_fd)
        close_all_but(job["fds"])
        confine(job)
    except (RefusedError, OSError) as error:
        report(report_fd, {"refused": str(error)})
        os._exit(1)
    run(job)


def map_users(child: int) -> None:
    """Ourselves, as an ordinary user inside; for root also root itself, to build the file system as, and nobody."""
    root = os.geteuid() == 0
    for kind, real in (("uid", os.geteuid()), ("gid", os.getegid())):
        if not root and kind == "gid":
            write(f"/proc/{child}/setgroups", "deny")
        write(f"/proc/{child}/{kind}_map", f"0 0 1\n{INSIDE} {NOBODY} 1" if root else f"{INSIDE} {real} 1")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def furnish(job: dict[str, Any]) -> None:
    """Make a new root in memory, with read-only libraries, three devices and a writable directory; drop the old one."""
    check(libc.sethostname(b"sandbox", 7), "host name")
    mount(None, "/", flags=MS_REC | MS_PRIVATE)
    new = "/proc"  # exists everywhere, and is not needed any more
    mount("tmpfs", new, "tmpfs", MS_NOSUID | MS_NODEV, f"size={job['disk']},nr_inodes=4096,mode=755")
    os.mkdir(new + "/tmp")
    os.chmod(new + "/tmp", 0o1777)
    for path in job["paths"]:
        is_folder = os.path.isdir(path)
        os.makedirs(new + (path if is_folder else os.path.dirname(path)), exist_ok=True)
        if not is_folder:
            write(new + path, "")
        mount(path, new + path, flags=MS_BIND | MS_REC)
        # struct mount_attr: set, clear, propagation, userns_fd; read-only, nosuid, nodev.
        attributes = struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0)
        arguments = (AT_FDCWD, (new + path).encode(), AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))
        check(libc.syscall(MOUNT_SETATTR, *arguments), "read-only mount")
    os.makedirs(new + "/dev")
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        write(new + device, "")
        mount(device, new + device, flags=MS_BIND)
    os.mkdir(new + "/old")
    check(libc.syscall(PIVOT_ROOT, new.encode(), (new + "/old").encode()), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")
    os.chdir("/tmp")


def open_network(port: int, fd: int) -> None:
    """Hand out, over a socket, one that listens in the network of this sandbox, which has no other host."""
    import fcntl
    import socket

    with socket.socket(fileno=fd) as link, socket.socket() as inside:
        # SIOCSIFFLAGS: the loopback device goes up and runs, which gives it its address.
        fcntl.ioctl(inside, 0x8914, struct.pack("16sh22x", b"lo", 0x41))
        with socket.create_server(("127.0.0.1", port), backlog=512) as server:
            socket.send_fds(link, [b"."], [server.fileno()])


def oversee(program: int, seconds: float) -> dict[str, Any]:
    """Reap processes until the program ends or its time is over; return how it ended."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                return {"exit": os.waitstatus_to_exitcode(ended[1])}
    return {"late": True}


def report(fd: int, content: dict[str, Any]) -> None:
    os.write(fd, json.dumps(content).encode() + b"\n")


def close_all_but(fds: list[int]) -> None:
    first = 3
    for fd in sorted(fds):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def confine(job: dict[str, Any]) -> None:
    """Drop every privilege, and the means to regain one."""
    limits = {"AS": job["memory"], "NPROC": job["processes"], "CPU": int(job["seconds"]) + 1, "FSIZE": job["disk"],
              "NOFILE": 64, "CORE": 0, "MEMLOCK": 0}  # fmt: skip
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)
    header, nothing = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 0, 0, 0, 0, 0, 0)
    check(libc.capset(header, nothing), "capset")
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    filter_calls((1, 2) if "port" in job else (1,), "command" in job)
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)


def filter_calls(families: tuple[int, ...], is_command: bool) -> None:
    """Deny system calls, sockets of other families than these, and what reaches files of the host."""
    machine = platform.machine()
    if machine not in MACHINES:
        raise RefusedError(f"seccomp: no table of system calls for {machine}")
    load, equal, above, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, granted, deny, absent, kill = 0x7FFF0000, 0x00050000, 0x00050001, 0x00050000 + 38, 0x80000000
    program = [(load, 0, 0, 4), (equal, 1, 0, MACHINES[machine]), (answer, 0, 0, kill), (load, 0, 0, 0)]
    program += [(above, 0, 1, 0x40000000), (answer, 0, 0, deny)]  # the second ABI of x86_64
    for number in (*DENIED[machine], *DENIED_ANYWHERE):
        program += [(equal, 0, 1, number), (answer, 0, 0, deny)]
    program += [(equal, 0, 1, FLOCK), (answer, 0, 0, absent if is_command else granted)]
    commands = {SETLEASE: deny, NOTIFY: deny} | dict.fromkeys(() if is_command else LOCKS, granted)
    verdicts = [((equal, 0, 1, number), (answer, 0, 0, verdict)) for number, verdict in commands.items()]
    program += [(equal, 0, 2 + 2 * len(verdicts), FCNTL), (load, 0, 0, 24), *sum(verdicts, ()), (answer, 0, 0, allow)]
    # Flags of clone3 lie in memory, where a filter cannot look; libc falls back on clone.
    program += [(equal, 0, 1, CLONE3), (answer, 0, 0, absent)]
    namespaces = sum(CLONE_NEW.values()) | 0x2000000
    program += [(equal, 0, 4, CLONE), (load, 0, 0, 16), (bits, 0, 1, namespaces), (answer, 0, 0, deny),
                (answer, 0, 0, allow)]  # fmt: skip
    # Sockets between the program's own processes alone, or within its network: some families know no namespace of it.
    count = len(families)
    allowed = [(equal, count - index, 0, family) for index, family in enumerate(families)]
    program += [(equal, 0, 3 + count, SOCKET), (load, 0, 0, 16), *allowed, (answer, 0, 0, deny), (answer, 0, 0, allow)]
    program += [(answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    packed = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, 2, packed, 0, 0), "seccomp")


def run(job: dict[str, Any]) -> None:
    """The program, a command or Python as `__main__`; how it ends is how this process ends."""
    if "command" in job:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execve(job["command"][0], job["command"], job["env"])
    sys.path[:] = [path for path in sys.path if path.startswith("/")] + job["packages"]
    sys.argv[:] = ["<program>"]
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(RECURSION)
    source = job["code"]
    linecache.cache["<program>"] = (len(source), None, source.splitlines(True), "<program>")
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(module).update(job["inputs"])
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # which `site` defines elsewhere
    try:
        exec(compile(source, "<program>", "exec", dont_inherit=True), vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace.tb_next if trace else None)
        sys.exit(1)


if __name__ == "__main__":
    main()
