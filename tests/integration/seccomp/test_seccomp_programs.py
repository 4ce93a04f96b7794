"""Real software behind the filter: what people run in sandboxes must not notice it."""

# ruff: noqa: E501 (scripts)

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"
Runner = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    """Run a command behind the filter in a folder of its own; its output, or a failure with all it said."""

    def runner(*command: str | Path, **env: str) -> str:
        found = subprocess.run(
            [sys.executable, HERE / "seccomp_filtered.py", *command],
            cwd=tmp_path,
            env={
                "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(SOURCE), "LANG": "C.UTF-8",
                "OPENBLAS_NUM_THREADS": "2", **env,
            },
            capture_output=True,
            text=True,
            timeout=110,
        )  # fmt: skip
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    return runner


def need(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


def python(run: Runner, code: str) -> str:
    # The parent's own check that it really stands behind the filter.
    check = "assert open('/proc/self/status').read().split('Seccomp:')[1].split()[0] == '2'\n"
    return run(sys.executable, "-W", "error", "-c", check + textwrap.dedent(code))


def test_threads(run: Runner) -> None:
    code = """
        import threading, queue, concurrent.futures as c
        results = queue.Queue()
        threads = [threading.Thread(target=results.put, args=(n,)) for n in range(20)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert sorted(results.queue) == list(range(20))
        with c.ThreadPoolExecutor(4) as pool: print(sum(pool.map(abs, range(-50, 0))))
    """
    assert python(run, code) == "1275\n"


def test_asyncio(run: Runner) -> None:
    code = """
        import asyncio, sys
        async def main():
            async def serve(reader, writer):
                writer.write(await reader.readline()); await writer.drain(); writer.close()
            for start, dial in ((lambda: asyncio.start_server(serve, "127.0.0.1", 0),
                                 lambda s: asyncio.open_connection(*s.sockets[0].getsockname()[:2])),
                                (lambda: asyncio.start_unix_server(serve, "s"),
                                 lambda s: asyncio.open_unix_connection("s"))):
                server = await start()
                reader, writer = await dial(server)
                writer.write(b"hello\\n")
                assert await reader.readline() == b"hello\\n"
                writer.close(); server.close()
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(6*7)", stdout=-1)
            print((await process.communicate())[0].decode(), await asyncio.to_thread(len, "abc"), end="")
            await asyncio.get_running_loop().getaddrinfo("localhost", 80)
        asyncio.run(main())
    """
    assert python(run, code).split() == ["42", "3"]


def test_subprocess_and_terminals(run: Runner) -> None:
    code = """
        import subprocess, os, pty, signal, tempfile, fcntl, mmap, select, resource, time
        assert subprocess.run("echo $((6*7)) | cat; exit 3", shell=True, capture_output=True).returncode == 3
        assert subprocess.run(["cat"], input=b"x" * 10**6, capture_output=True).stdout == b"x" * 10**6
        subprocess.run(["true"], start_new_session=True, preexec_fn=os.setsid if False else None, check=True)
        pid, terminal = pty.fork()
        if pid == 0: os.execvp("sh", ["sh", "-c", "tty >/dev/null && echo on a terminal"])
        assert b"on a terminal" in os.read(terminal, 100); os.waitpid(pid, 0)
        seen = []
        signal.signal(signal.SIGALRM, lambda *_: seen.append(1)); signal.setitimer(signal.ITIMER_REAL, 0.01)
        signal.pause(); assert seen
        with tempfile.TemporaryFile() as file:
            file.truncate(8192); fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX)
            memory = mmap.mmap(file.fileno(), 8192); memory[:2] = b"ok"; memory.flush()
        os.mkfifo("pipe"); os.symlink("pipe", "link"); os.link("pipe", "hard"); os.rename("hard", "moved")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))
        os.memfd_create("x"); os.getrandom(8); os.pidfd_open(os.getpid()); os.copy_file_range
        select.epoll().close(); os.eventfd(0)
        print("done")
    """
    assert python(run, code) == "done\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(run: Runner, tmp_path: Path, method: str) -> None:
    (tmp_path / "job.py").write_text(
        textwrap.dedent(
            """
            import multiprocessing as m, sys
            from multiprocessing import shared_memory

            def square(n): return n * n

            if __name__ == "__main__":
                context = m.get_context(sys.argv[1])
                with context.Pool(2) as pool: print(sum(pool.map(square, range(10))))
                queue, lock = context.Queue(), context.Lock()
                process = context.Process(target=queue.put, args=("hello",)); process.start()
                print(queue.get(timeout=30)); process.join()
                memory = shared_memory.SharedMemory(create=True, size=100); memory.buf[:2] = b"hi"
                memory.close(); memory.unlink()
            """
        )
    )
    assert run(sys.executable, "job.py", method).split() == ["285", "hello"]


@pytest.mark.parametrize("module", ["sqlite3", "ssl", "ctypes", "socketserver", "lzma", "hashlib", "curses"])
def test_modules(run: Runner, module: str) -> None:
    python(run, f"import {module}")


def test_numpy_and_pandas(run: Runner) -> None:
    for module in ("numpy", "pandas"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed beside the tests")
    code = """
        import numpy as np, pandas as pd
        a = np.random.default_rng(1).random((400, 400))
        assert np.allclose(np.linalg.inv(a) @ a, np.eye(400))
        frame = pd.DataFrame({"k": list("abab"), "v": [1, 2, 3, 4]})
        frame.to_csv("f.csv", index=False)
        print(pd.read_csv("f.csv").groupby("k").v.sum().to_dict())
    """
    # Third-party modules may warn; the point is that they work.
    assert run(sys.executable, "-c", textwrap.dedent(code)) == "{'a': 4, 'b': 6}\n"


def test_node(run: Runner) -> None:
    node = need("node")
    code = """
        const fs = require('fs'), os = require('os'), net = require('net'), cp = require('child_process');
        const { Worker } = require('worker_threads');
        fs.writeFileSync('a.txt', 'hello'); fs.watch('.').close(); os.networkInterfaces(); os.cpus();
        if (cp.execSync('cat a.txt').toString() !== 'hello') process.exit(1);
        const worker = new Worker("require('worker_threads').parentPort.postMessage(6 * 7)", { eval: true });
        worker.once('message', answer => {
          const server = net.createServer(socket => socket.end('bye')).listen(0, '127.0.0.1', () => {
            net.connect(server.address().port, '127.0.0.1').on('data', text => {
              console.log(answer, text.toString()); server.close();
            });
          });
        });
    """
    assert run(node, "-e", code) == "42 bye\n"


def test_git(run: Runner) -> None:
    git = need("git")
    user = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    run(git, "init", "-q", "repo")
    run("sh", "-c", "seq 1 2000 > repo/file")
    run(git, "-C", "repo", "add", ".")
    run(git, "-C", "repo", *user, "commit", "-q", "-m", "first")
    run(git, "clone", "-q", "repo", "copy")
    run(git, "-C", "copy", "gc", "-q")
    assert run(git, "-C", "copy", "log", "--format=%s") == "first\n"


def test_gcc(run: Runner, tmp_path: Path) -> None:
    gcc = need("gcc")
    (tmp_path / "hello.c").write_text(
        "#include <pthread.h>\n#include <stdio.h>\n"
        "static void *say(void *text) { puts(text); return 0; }\n"
        'int main(void) { pthread_t t; pthread_create(&t, 0, say, "hello"); return pthread_join(t, 0); }\n'
    )
    run(gcc, "-O2", "-Wall", "-pthread", "-o", "hello", "hello.c")
    assert run(tmp_path / "hello") == "hello\n"
    run(gcc, "-fsanitize=address,undefined", "-pthread", "-o", "checked", "hello.c")
    # The leak checker needs ptrace, which the filter denies; the rest of the sanitizers works.
    assert run(tmp_path / "checked", ASAN_OPTIONS="detect_leaks=0") == "hello\n"


def test_pip_installs_a_local_wheel(run: Runner, tmp_path: Path) -> None:
    name = "greeting-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("greeting.py", "print('hello from a wheel')\n")
        wheel.writestr(
            "greeting-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n"
        )
        wheel.writestr(
            "greeting-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("greeting-1.0.dist-info/RECORD", "")
    if importlib.util.find_spec("ensurepip") is None:
        pytest.skip("this Python can't make virtual environments (python3-venv is not installed)")
    run(sys.executable, "-m", "venv", "env")
    run(tmp_path / "env/bin/pip", "install", "-q", "--no-index", "--disable-pip-version-check", name)
    assert run(tmp_path / "env/bin/python", "-c", "import greeting") == "hello from a wheel\n"


def test_shell_tools(run: Runner) -> None:
    script = """
        set -e
        seq 1 100000 | sort -rn | head -1; mkdir d; cp -a /etc/hostname d/; tar czf d.tgz d; tar tzf d.tgz | wc -l
        find . -name hostname -exec cat {} + > /dev/null; mkfifo p; (echo through > p) & cat p; wait
        dd if=/dev/zero of=f bs=1M count=2 2>/dev/null; truncate -s 1M f; chmod 600 f; touch -d 2001-01-01 f; sync f; df . >/dev/null
        timeout 5 true; nice -n 5 true; nohup true 2>/dev/null; ulimit -n 256; sha256sum f | wc -l
    """
    assert run("bash" if shutil.which("bash") else "sh", "-c", script).split() == [
        "100000",
        "2",
        "through",
        "1",
    ]


def test_ip_shows_addresses_and_changes_nothing(run: Runner) -> None:
    ip = need("ip")
    assert "lo" in run(ip, "address")
