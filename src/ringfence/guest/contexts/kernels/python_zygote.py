"""The zygote of Python contexts: an interpreter that runs nobody's code, and is copied where one is to begin.

The guest agent asks on descriptor 0, a socket of packets: folder and environment of the copy, a NUL after
each, and four descriptors (input, output, errors, report). The copy's parent ends, so that it becomes the
agent's child as any command is; then it reports its number, and goes on as a kernel that was started for it
alone. What can't be is reported as an errno, and the host starts a cold interpreter.

The host sends ``KERNEL = "…"`` before this text: the whole of the Python kernel.
"""
# mypy: ignore-errors

import _socket
import gc
import os
import signal
import struct

MOST = 262144  # bytes of a request
DESCRIPTORS = 4
# What an interpreter and its C library read when they start: with others a copy would not be the same.
NAMES = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ")
PREFIXES = ("PYTHON", "LD_", "LC_", "MALLOC_", "GLIBC_")
ESTALE = 116


def settled(env):
    """The variables that can't be changed any more."""
    return {
        name: value
        for name, value in env.items()
        if os.fsdecode(name) in NAMES or os.fsdecode(name).startswith(PREFIXES)
    }


def refuse(report, number):
    """There is no copy, and why."""
    try:
        os.write(report, struct.pack("=II", number or ESTALE, 1))
    except OSError:
        pass


def take(control):
    """The next request: descriptors, folder and environment; ``None`` at the end."""
    while True:
        data, rights, flags, _ = control.recvmsg(MOST, _socket.CMSG_SPACE(16 * DESCRIPTORS))
        if not data and not rights:
            return None
        files = []
        for level, kind, body in rights:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                files += struct.unpack("=%di" % (len(body) // 4), body[: len(body) // 4 * 4])
        words = data.split(b"\0")
        if (
            len(files) == DESCRIPTORS
            and len(words) > 1
            and not flags & (_socket.MSG_TRUNC | _socket.MSG_CTRUNC)
        ):
            return files, words[0], dict(word.split(b"=", 1) for word in words[1:-1] if b"=" in word)
        for number in files:
            os.close(number)


def become(files, where, env):
    """In the copy, which is the agent's child now: all that a command of its own has."""
    report = files[-1]
    try:
        os.setsid()
        os.chdir(where)
        for number in range(3):
            os.dup2(files[number], number)
        os.environb.clear()
        os.environb.update(env)
        kernel["reseed"]()
    except OSError as error:
        refuse(report, error.errno)
        os._exit(1)
    os.write(report, struct.pack("=II", os.getpid(), 0))
    os.closerange(3, 256)


def copy(files, where, env):
    """Fork twice. True in the copy."""
    wait, go = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        refuse(files[-1], error.errno)
        between = -1
    if between == 0:
        try:
            mine = os.fork() == 0
        except OSError as error:
            refuse(files[-1], error.errno)
            mine = False
        if not mine:
            os._exit(0)
        os.close(go)
        os.read(wait, 1)  # until the parent has been buried: it is the agent's child then
        become(files, where, env)
        return True
    if between > 0:
        os.waitpid(between, 0)
    for number in (wait, go, *files):
        os.close(number)
    return False


def serve():
    """Until there is no agent. True in a copy."""
    control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, 0)
    started = settled(dict(os.environb))
    while True:
        request = take(control)
        if request is None:
            return False
        files, where, env = request
        if settled(env) != started:
            refuse(files[-1], ESTALE)
            for number in files:
                os.close(number)
        elif copy(files, where, env):
            control.detach()
            return True


kernel = {"__name__": "ringfence"}
exec(compile(KERNEL, "<ringfence kernel>", "exec"), kernel)  # noqa: F821
exec(compile(kernel["DISPLAY"], "<ringfence display>", "exec"), kernel["displays"])
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.write(1, b'{"t": "ready", "x": ""}\n')
gc.collect()
gc.freeze()
if serve():
    kernel["main"]()
