# ruff: noqa
# KIND …: a call that WebAssembly has none of. What is not there is `no-such-call`.
kind, rest = sys.argv[1], sys.argv[2:]


def ctypes_call():
    import ctypes

    return ctypes.CDLL(None).getpid()


def thread():
    import threading

    made = threading.Thread(target=lambda: None)
    made.start()
    made.join()


def subprocess_run():
    import subprocess

    return subprocess.run(["true"], check=True)


def process(run):
    pid = run()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def connect(family, address):
    import socket

    made = socket.socket(getattr(socket, family))
    made.settimeout(3)
    made.connect(address)


def listen():
    import socket

    made = socket.socket(socket.AF_INET)
    made.bind(("127.0.0.1", 0))
    made.listen()


def resolve():
    import socket

    socket.getaddrinfo("localhost", 80)


def mapping():
    import mmap

    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)


CALLS = {
    "fork": lambda: process(os.fork),
    "exec": lambda: os.execv("/bin/sh", ["sh", "-c", 'echo \'{"outcome": "succeeded"}\'']),
    "spawn": lambda: process(lambda: os.posix_spawn("/bin/true", ["true"], {})),
    "system": lambda: os.system("true"),
    "subprocess": subprocess_run,
    "thread": thread,
    "ctypes": ctypes_call,
    "executable-memory": mapping,
    "kill": lambda: os.kill(int(rest[0]), 9),
    "setuid": lambda: os.setuid(0),
    "fifo": lambda: os.mkfifo("rf-fifo"),
    "tcp": lambda: connect("AF_INET", ("127.0.0.1", int(rest[0]))),
    "tcp6": lambda: connect("AF_INET6", ("::1", int(rest[0]))),
    "unix": lambda: connect("AF_UNIX", rest[0]),
    "abstract": lambda: connect("AF_UNIX", "\0" + rest[0]),
    "listen": listen,
    "resolve": resolve,
    "hard-link-out": lambda: os.link(rest[0], "rf-hard"),
    "truncate": lambda: os.truncate(rest[0], 0),
    "remove": lambda: os.unlink(rest[0]),
    "overwrite": lambda: os.close(os.open(rest[0], os.O_WRONLY)),
    "make-there": lambda: os.close(os.open(rest[0] + "/rf-made", os.O_WRONLY | os.O_CREAT)),
    "list": lambda: os.listdir(rest[0]),
}
try:
    CALLS[kind]()
except OSError as error:
    denied(error)
except (AttributeError, ImportError, NotImplementedError, RuntimeError):
    verdict("no-such-call")
verdict("succeeded")
