"""Standard input and output: apart, binary, large, closed, resumed."""

from __future__ import annotations

import asyncio
import hashlib

from ringfence.conformance.harness import Kit, RuntimeSuite, finish, python, read_until, run
from ringfence.conformance.plugin import needs
from ringfence.guest.processes import FROM_NOW, ProcessSpec

MIB = 1024 * 1024
# 50 MiB of a pattern that repeats at no power of two, so that a lost or doubled block shows.
PATTERN = (
    "import sys,hashlib\n"
    "block=bytes(range(251))*1000\nleft=int(sys.argv[1])\nh=hashlib.sha256()\n"
    "out=sys.stdout.buffer\n"
    "while left>0:\n d=block[:left]; out.write(d); h.update(d); left-=len(d)\n"
    "out.flush(); sys.stderr.write(h.hexdigest())"
)


class StreamSuite(RuntimeSuite):
    """stdin, stdout and stderr of commands."""

    @needs("programs")
    async def test_stdout_and_stderr_are_apart(self, kit: Kit) -> None:
        link = await kit.started()
        done = await run(link, "/bin/sh", "-c", "echo out; echo err >&2; echo out2; echo err2 >&2")
        assert (done.stdout, done.stderr) == (b"out\nout2\n", b"err\nerr2\n")
        done = await run(link, "/bin/sh", "-c", "echo out; echo err >&2; echo out2", merge_stderr=True)
        assert (done.stdout, done.stderr) == (b"out\nerr\nout2\n", b"")

    async def test_bytes_come_through_as_they_are(self, kit: Kit) -> None:
        link = await kit.started()
        data = bytes(range(256)) * 300
        assert (await run(link, "cat", stdin=data)).stdout == data

    async def test_no_stdin_is_an_empty_one(self, kit: Kit) -> None:
        link = await kit.started()
        done = await run(link, "cat")
        assert (done.exit.code, done.stdout) == (0, b"")

    async def test_fifty_megabytes_of_output(self, kit: Kit) -> None:
        link = await kit.started()
        size = 50 * MIB
        process = await link.start(ProcessSpec(("/usr/bin/python3", "-I", "-S", "-c", PATTERN, str(size))))
        digest, total, errors = hashlib.sha256(), 0, bytearray()
        async for stream, offset, data in process:
            if stream == 1:
                assert offset == total
                digest.update(data)
                total += len(data)
            else:
                errors += data
        assert (await process.wait()).code == 0
        assert total == size
        assert digest.hexdigest() == errors.decode()

    @needs("programs")
    async def test_twenty_megabytes_of_input(self, kit: Kit) -> None:
        link = await kit.started()
        data = bytes(range(249)) * (20 * MIB // 249)
        done = await run(link, "sha256sum", stdin=data)
        assert done.text.split()[0] == hashlib.sha256(data).hexdigest()

    @needs("programs")
    async def test_a_command_that_does_not_read_its_input(self, kit: Kit) -> None:
        link = await kit.started()
        process = await link.start(
            ProcessSpec(("/bin/sh", "-c", "exec <&-; sleep 0.05; echo done"), stdin=True)
        )
        writing = asyncio.create_task(process.write(bytes(2 * MIB)))
        done = await finish(process)
        await asyncio.wait([writing])
        writing.exception()  # EPIPE, or nothing if the command ended first: both are right
        assert done.text == "done"

    async def test_stdin_stays_open_until_closed(self, kit: Kit) -> None:
        link = await kit.started()
        process = await link.start(ProcessSpec(("cat",), stdin=True))
        await process.write(b"one\n")
        assert await read_until(process, b"one\n") == b"one\n"
        await process.write(b"two\n")
        assert await read_until(process, b"two\n") == b"two\n"
        await process.close_stdin()
        assert (await finish(process)).exit.code == 0

    async def test_a_slow_reader_holds_the_command_back_and_loses_nothing(self, kit: Kit) -> None:
        link = await kit.started()
        spec = ProcessSpec(
            ("/usr/bin/python3", "-I", "-S", "-c", PATTERN, str(3 * MIB)), ring=65536, window=65536
        )
        process = await link.start(spec)
        # Another command on the same link goes on meanwhile: flow control is per channel.
        assert (await run(link, "echo", "free")).text == "free"
        assert process.exit is None
        done = await finish(process)
        assert len(done.stdout) == 3 * MIB
        assert hashlib.sha256(done.stdout).hexdigest() == done.stderr.decode()

    async def test_resume_by_offset_after_a_lost_link(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        link = await kit.link(sandbox)
        size = 4 * MIB
        spec = ProcessSpec(
            ("/usr/bin/python3", "-I", "-S", "-c", PATTERN, str(size)), id="long", ring=65536, window=65536
        )
        process = await link.start(spec)
        digest, total, drops = hashlib.sha256(), 0, 0
        while True:
            async for stream, offset, data in process:
                if stream == 1:
                    assert offset == total
                    digest.update(data)
                    total += len(data)
                    if drops < 5 and total > (drops + 1) * size // 6:
                        break  # the link is torn in the middle of everything
                else:
                    errors = data
            else:
                break
            drops += 1
            await link.close()
            link = await kit.link(sandbox)
            # The same window again: no more may be on its way than the ring keeps.
            process = await link.attach("long", stdout=total, window=65536)
        assert drops == 5
        assert total == size
        assert digest.hexdigest() == errors.decode()

    @needs("programs")
    async def test_a_command_outlives_its_link_and_its_output_is_kept(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        link = await kit.link(sandbox)
        await link.start(
            ProcessSpec(("/bin/sh", "-c", "echo early; read x; echo late $x"), id="kept", stdin=True)
        )
        await link.close()
        link = await kit.link(sandbox)
        process = await link.attach("kept", stdout=0)
        assert await read_until(process, b"early\n") == b"early\n"
        await process.write(b"word\n")
        assert (await finish(process)).text == "late word"
        again = await finish(await link.attach("kept", stdout=0))
        assert again.stdout == b"early\nlate word\n"
        assert again.exit.code == 0

    @needs("programs")
    async def test_detached(self, kit: Kit) -> None:
        link = await kit.started()
        await link.start(ProcessSpec(("/bin/sh", "-c", "echo alone; exit 5"), id="alone", detached=True))
        done = await finish(await link.attach("alone", stdout=0, stderr=0))
        assert (done.text, done.exit.code) == ("alone", 5)

    async def test_dropping_the_oldest(self, kit: Kit) -> None:
        link = await kit.started()
        spec = ProcessSpec(
            ("/usr/bin/python3", "-I", "-S", "-c", PATTERN, str(MIB)),
            id="much",
            ring=65536,
            drop=True,
            detached=True,
        )
        await link.start(spec)
        await (await link.attach("much", output=False)).wait()
        process = await link.attach("much", stdout=0)
        pieces = [piece async for piece in process if piece.stream == 1]
        assert pieces[0].offset >= MIB - 65536 - 4096
        assert pieces[-1].offset + len(pieces[-1].data) == MIB

    @needs("programs")
    async def test_from_now_on(self, kit: Kit) -> None:
        link = await kit.started()
        first = await link.start(
            ProcessSpec(("/bin/sh", "-c", "echo old; read x; echo new"), id="two", stdin=True)
        )
        await read_until(first, b"old")
        second = await link.attach("two", stdout=FROM_NOW, stderr=FROM_NOW)
        await first.write(b"\n")
        assert (await finish(second)).stdout.lstrip(b"\n") == b"new\n"

    @needs("programs")
    async def test_a_background_child_does_not_hold_the_command(self, kit: Kit) -> None:
        link = await kit.started()
        done = await run(link, "/bin/sh", "-c", "(sleep 60; echo never) & echo now")
        assert (done.exit.code, done.text) == (0, "now")

    @needs("programs")
    async def test_two_readers_see_the_same(self, kit: Kit) -> None:
        sandbox = await kit.sandbox()
        one, two = await kit.link(sandbox), await kit.link(sandbox)
        spec = ProcessSpec(("/bin/sh", "-c", "read x; seq 1 5000"), id="shared", stdin=True)
        first = await one.start(spec)
        second = await two.attach("shared", stdout=0)
        await first.write(b"\n")
        a, b = await asyncio.gather(finish(first), finish(second))
        assert a.stdout == b.stdout
        assert a.stdout.endswith(b"\n5000\n")

    async def test_no_file_descriptor_leaks_into_output(self, kit: Kit) -> None:
        link = await kit.started()
        done = await python(link, "print(1, end=''); import sys; sys.stderr.write('2')")
        assert (done.stdout, done.stderr) == (b"1", b"2")
