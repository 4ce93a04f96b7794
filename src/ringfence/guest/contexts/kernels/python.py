"""The Python kernel: runs inside a sandbox, keeps variables between calls, answers in lines of JSON.

Standard library only, CPython 3.8 or newer. Requests come on descriptor 0, answers go to descriptor 1; both
are taken away before any code of the user runs, and replaced: input is empty, and what is written to
descriptors 1 and 2 by whomever (C libraries, child processes) comes through pipes as output of the call.

The host sends two things before this text: ``DISPLAY = "…"``, which is ``python_display.py``, compiled when
first needed; and ``python_output.py``, whose names are used as if they stood here.
"""
# mypy: ignore-errors

import ast
import builtins
import json
import linecache
import os
import signal
import sys
import threading
import traceback
import types


class PyplotHook:
    """Gives ``matplotlib.pyplot`` a ``show`` that displays, when it is imported."""

    def __init__(self, show):
        self.show = show
        self.looking = False

    def find_spec(self, name, path=None, target=None):
        """For ``sys.meta_path``."""
        if name != "matplotlib.pyplot" or self.looking:
            return None
        import importlib.util

        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.show = self.show

        spec.loader.exec_module = exec_module
        return spec


# -- calls


class Kernel:
    """One context: a namespace and the loop that serves it."""

    def __init__(self, requests, answers, pipes):
        self.requests = requests
        self.answers = answers
        self.pipes = pipes
        self.count = 0
        self.running = self.forking = False
        self.loop = None
        self.module = types.ModuleType("__main__")
        self.module.__dict__.update(__builtins__=builtins, display=self.display, exit=_exit, quit=_exit)
        sys.modules["__main__"] = self.module
        sys.argv = [""]
        sys.stdout, sys.stderr = pipes.streams
        sys.stdin = open(0, closefd=False)
        builtins.display = self.display

        def show(*_, **__):  # a function: Matplotlib gives it a signature
            self._figures()

        sys.meta_path.insert(0, PyplotHook(show))
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].show = show
        os.environ.setdefault("MPLBACKEND", "Agg")
        if "" not in sys.path:
            sys.path.insert(0, "")
        signal.signal(signal.SIGINT, self._interrupt)
        os.register_at_fork(after_in_child=self._forked)

    def _interrupt(self, *_):
        if not self.running:
            return
        if self.answers.guard:
            self.answers.pending = True
        else:
            raise KeyboardInterrupt

    def _forked(self):
        """In a child that the user's code forked: it prints to the descriptors, and is no kernel."""
        if self.forking:
            return
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        self.answers.lock = threading.RLock()
        self.answers.send = lambda _: None
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def serve(self):
        """Until the requests end."""
        for request in self.requests:
            if request.get("op") == "run":
                if request.get("fresh"):
                    self.fork(request)
                else:
                    self.run(request)

    def fork(self, request):
        """One call in a copy of this process: it sees all that is here, imports too, and changes nothing."""
        self.forking = True
        pid = os.fork()
        self.forking = False
        if not pid:
            try:
                self._renew()
                self.run(request)
            finally:
                os._exit(0)
        status = os.waitpid(pid, 0)[1]
        self.count += 1
        if status:
            self.answers.call = str(request.get("x", ""))
            how = "signal %d" % (status & 127) if status & 127 else "exit code %d" % (status >> 8)
            self.answers.say("error", name="RunEnded", value="ended by " + how, traceback="")
            self.answers.say("end", n=self.count)
            self.answers.call = ""

    def _renew(self):
        """In a copy: output of its own, and randomness that no other copy has."""
        self.answers.lock = threading.RLock()
        self.pipes = Pipes(self.answers)
        self.pipes.start()
        sys.stdout, sys.stderr = self.pipes.streams
        self.loop = None
        if "asyncio" in sys.modules:
            sys.modules["asyncio"].set_event_loop(None)
        reseed()

    def run(self, request):
        """One call."""
        answers = self.answers
        answers.call = str(request.get("x", ""))
        self.count += 1
        answers.say("start", n=self.count)
        saved = None
        try:
            env = request.get("env") or {}
            if env:
                saved = {name: os.environ.get(name) for name in env}
                os.environ.update(env)
            try:
                self.running = True
                try:
                    self._execute(str(request.get("code", "")))
                    self._figures()
                finally:
                    self.running = False
            except BaseException as error:
                self._failed(error)
        except KeyboardInterrupt:  # between two lines of ours
            self.running = False
            answers.say("error", name="KeyboardInterrupt", value="", traceback="KeyboardInterrupt\n")
        self.running = answers.pending = False
        if saved is not None:
            for name, value in saved.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        self.pipes.finish()
        answers.say("end", n=self.count)
        answers.call = ""

    def _execute(self, code):
        name = "<cell %d>" % self.count
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        tree = ast.parse(code, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not code.rstrip().endswith(";"):
            last = ast.Expression(tree.body.pop().value)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        if tree.body:
            self._eval(compile(tree, name, "exec", flags, True))
        if last is not None:
            value = self._eval(compile(last, name, "eval", flags, True))
            if value is not None:
                self.module.__dict__["_"] = value
                self._show(value, True)

    def _eval(self, code):
        if not code.co_flags & 0x80:  # CO_COROUTINE
            return eval(code, self.module.__dict__)
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(eval(code, self.module.__dict__))
        try:
            return self.loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            try:
                self.loop.run_until_complete(task)
            except BaseException:
                pass
            raise

    def display(self, *values, **_):
        """Show objects in all the forms they have."""
        for value in values:
            self._show(value, False)

    def _show(self, value, main):
        figure = _is_figure(value)
        shown = represent(value)
        self.pipes.finish()
        self.answers.say("result", main=main, **shown)
        if figure and "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close(value)

    def _figures(self):
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None or not hasattr(pyplot, "get_fignums"):
            return
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            try:
                if figure.axes:
                    self._show(figure, False)
            finally:
                pyplot.close(figure)

    def _failed(self, error):
        self.pipes.finish()
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
            trace = trace.tb_next
        try:
            lines = traceback.format_exception(type(error), error, trace)
            value = str(error)
        except BaseException:
            lines, value = ["%s\n" % type(error).__name__], "(its text can't be had)"
        text = "".join(lines)
        if len(text) > MOST_TEXT:
            text = text[: MOST_TEXT // 2] + "\n\u2026\n" + text[-MOST_TEXT // 2 :]
        self.answers.say("error", name=type(error).__name__, value=value[:MOST_TEXT], traceback=text)


def reseed():
    """Random generators begin anew: in a copy they would go on as in every other."""
    for name in ("random", "numpy.random"):
        module = sys.modules.get(name)
        if module is not None:
            try:
                module.seed(int.from_bytes(os.urandom(4), "big"))
            except Exception:
                pass


def represent(value):
    """All forms of an object. Plain ones need no more than their text."""
    kind = type(value)
    if kind in (int, float, bool, str, bytes, complex):
        text = repr(value)
        if len(text) <= MOST_TEXT:
            return {"text": text}
    if not displays:
        exec(compile(DISPLAY, "<ringfence display>", "exec"), displays)
    return displays["represent"](value)


displays = {}


def _is_figure(value):
    return type(value).__module__.startswith("matplotlib.") and hasattr(value, "savefig")


def _exit(code=None):
    """``exit()`` ends the call, not the context."""
    raise SystemExit(code)


class Requests:
    """Lines of JSON from a descriptor; long ones come in parts."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        held, parts = b"", {}
        while True:
            at = held.find(b"\n")
            if at < 0:
                try:
                    data = os.read(self.source, 65536)
                except InterruptedError:
                    continue
                if not data:
                    return
                held += data
                continue
            line, held = held[:at], held[at + 1 :]
            try:
                request = json.loads(line)
                if request["op"] in ("part", "last"):
                    parts[request["x"]] = parts.get(request["x"], "") + request["d"]
                    if request["op"] == "part":
                        continue
                    request = json.loads(parts.pop(request["x"]))
            except (ValueError, KeyError, TypeError):
                continue
            yield request


def main():
    """Serve one context over descriptors 0 and 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def send(data):
        while data:
            data = data[os.write(sink, data) :]

    answers = Answers(send)
    pipes = Pipes(answers)
    pipes.start()
    kernel = Kernel(Requests(source), answers, pipes)
    answers.say("ready", version=sys.version.split()[0])
    kernel.serve()


if __name__ == "__main__":
    main()
