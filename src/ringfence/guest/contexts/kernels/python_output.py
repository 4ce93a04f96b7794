"""What a Python context prints: the first part of its kernel, sent in before ``python.py``."""
# mypy: ignore-errors

import json
import os
import select
import signal
import threading
import time

CHUNK = 16384  # characters of JSON a line; longer messages go in parts
MOST_TEXT = 4 * 1024 * 1024  # characters of one text
HOLD = 0.02  # seconds that output may wait for more


class Answers:
    """Lines of JSON to the host, whole ones, from whichever thread."""

    def __init__(self, send):
        self.send = send
        self.lock = threading.RLock()
        self.main = threading.get_ident()
        self.guard = 0  # an interrupt of the main thread waits until the line is out
        self.pending = False
        self.call = ""

    def begin(self):
        """No interrupt from here on."""
        if threading.get_ident() == self.main:
            self.guard += 1
        self.lock.acquire()

    def done(self):
        """What :meth:`begin` began is over; an interrupt that came meanwhile is raised now."""
        self.lock.release()
        if threading.get_ident() == self.main:
            self.guard -= 1
            if not self.guard and self.pending:
                self.pending = False
                raise KeyboardInterrupt

    def say(self, kind, **fields):
        """One message of the present call."""
        self.begin()
        try:
            fields["t"] = kind
            fields["x"] = self.call
            text = json.dumps(fields)
            if len(text) <= CHUNK:
                self.send(text.encode() + b"\n")
                return
            for at in range(0, len(text), CHUNK):
                piece = {"t": "part", "x": self.call, "d": text[at : at + CHUNK]}
                if at + CHUNK >= len(text):
                    piece["t"] = "last"
                self.send(json.dumps(piece).encode() + b"\n")
        finally:
            self.done()


class Output:
    """``sys.stdout`` or ``sys.stderr`` of the user's code."""

    encoding = "utf-8"
    errors = "replace"
    newlines = None
    closed = False
    line_buffering = True
    mode = "w"

    def __init__(self, answers, kind, number, poke):
        self.answers = answers
        self.name = "<%s>" % kind
        self._kind = kind
        self._number = number
        self._poke = poke
        self._held = []
        self._size = 0
        self._last = 0.0
        self._poked = False

    def write(self, text):
        """Text that is sent soon."""
        if not isinstance(text, str):
            raise TypeError("write() argument must be str, not %s" % type(text).__name__)
        if not text:
            return 0
        self.answers.begin()
        try:
            self._held.append(text)
            self._size += len(text)
            if self._size >= CHUNK // 2 or (time.monotonic() - self._last > HOLD and "\n" in text):
                self._flush()
            elif not self._poked:
                self._poked = True
                self._poke()
        finally:
            self.answers.done()
        return len(text)

    def writelines(self, lines):
        """Several texts."""
        for line in lines:
            self.write(line)

    def flush(self):
        """Send what is held."""
        self.answers.begin()
        try:
            self._flush()
        finally:
            self.answers.done()

    def _flush(self):
        self._poked = False
        if self._held:
            text = "".join(self._held)
            self._held = []
            self._size = 0
            self._last = time.monotonic()
            for at in range(0, len(text), CHUNK // 2):
                self.answers.say(self._kind, s=text[at : at + CHUNK // 2])

    def fileno(self):
        """The descriptor, for child processes."""
        return self._number

    def isatty(self):
        """It is none."""
        return False

    def readable(self):
        """It is not."""
        return False

    def writable(self):
        """It is."""
        return True

    def seekable(self):
        """It is not."""
        return False

    def close(self):
        """It stays open."""

    def reconfigure(self, **_):
        """Nothing can be changed."""

    @property
    def buffer(self):
        """For bytes."""
        return _Bytes(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.flush()


class _Bytes:
    """``sys.stdout.buffer``."""

    def __init__(self, text):
        self._text = text

    def write(self, data):
        """Bytes, as text."""
        self._text.write(bytes(data).decode("utf-8", "replace"))
        return len(data)

    def flush(self):
        """Send what is held."""
        self._text.flush()

    def fileno(self):
        """The descriptor."""
        return self._text.fileno()


class Pipes:
    """What is written to descriptors 1 and 2, and held output that nobody flushes."""

    def __init__(self, answers):
        self.answers = answers
        self.ends = []
        for number, kind in ((1, "stdout"), (2, "stderr")):
            out, into = os.pipe()
            os.dup2(into, number)
            os.close(into)
            os.set_blocking(out, False)
            self.ends.append((out, kind))
        self.wake, self.waker = os.pipe()
        os.set_blocking(self.waker, False)
        self.streams = [
            Output(answers, kind, number, self.poke) for number, kind in ((1, "stdout"), (2, "stderr"))
        ]
        self.rest = {}

    def start(self):
        """Begin to read."""
        threading.Thread(target=self._run, name="ringfence-output", daemon=True).start()

    def poke(self):
        """Something is held."""
        try:
            os.write(self.waker, b"!")
        except OSError:
            pass

    def _run(self):
        readers = [out for out, _ in self.ends] + [self.wake]
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        except (AttributeError, OSError):
            pass
        while True:
            ready = select.select(readers, [], [])[0]
            if self.wake in ready:
                os.read(self.wake, 4096)
                time.sleep(HOLD)
                for stream in self.streams:
                    stream.flush()
            self.drain(ready)

    def drain(self, ready=None):
        """Everything that is in the pipes now (at most 1 MiB: a flood must not hold up the end)."""
        self.answers.begin()
        try:
            for out, kind in self.ends:
                if ready is not None and out not in ready:
                    continue
                for _ in range(64):
                    try:
                        data = os.read(out, CHUNK // 2)
                    except OSError:
                        break
                    if not data:
                        break
                    data = self.rest.pop(kind, b"") + data
                    text, self.rest[kind] = _decode(data)
                    if text:
                        self.answers.say(kind, s=text)
        finally:
            self.answers.done()

    def finish(self):
        """A call ends: all that it has written goes before its end."""
        for stream in self.streams:
            stream.flush()
        self.drain()


def _decode(data):
    """Text, and the bytes of a character that is not complete."""
    for back in range(1, min(4, len(data)) + 1):
        if data[-back] >= 0xC0:
            length = 2 if data[-back] < 0xE0 else 3 if data[-back] < 0xF0 else 4
            if length > back:
                return data[:-back].decode("utf-8", "replace"), data[-back:]
            break
        if data[-back] < 0x80:
            break
    return data.decode("utf-8", "replace"), b""
