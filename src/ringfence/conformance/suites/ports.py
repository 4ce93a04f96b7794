"""Ports: reaching servers inside, and taking connections from inside."""

from __future__ import annotations

import asyncio
import errno
import time
from dataclasses import replace

import pytest

from ringfence.conformance.harness import Kit, RuntimeSuite, finish, read_until, request_for
from ringfence.conformance.plugin import LISTED, needs
from ringfence.guest import doors
from ringfence.guest.link import GuestLink
from ringfence.guest.ports import GuestStream
from ringfence.guest.processes import GuestProcess, ProcessSpec
from ringfence.model.errors import GuestRefused

DOOR = """
import os, socket
from urllib.parse import urlsplit
names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
names.settimeout(60)
names.sendto(b"name?", ("127.0.0.1", 53))
address = names.recv(100).decode()
port = urlsplit(os.environ["https_proxy"]).port
proxy = socket.create_connection(("127.0.0.1", port), 60)
proxy.sendall(b"proxied")
proxy.close()
try:
    caught = socket.create_connection((address, 443), 60)
    caught.sendall(b"caught")
    caught.close()
    print(True)
except OSError:
    print(False)
print("bundle" if b"CERTIFICATE" in open(os.environ["SSL_CERT_FILE"], "rb").read() else "none", port)
"""
SERVER = """
import socket, sys
family = socket.AF_INET6 if sys.argv[1] == "::1" else socket.AF_INET
s = socket.socket(family); s.bind((sys.argv[1], 0)); s.listen()
print(s.getsockname()[1], flush=True)
while True:
    c, _ = s.accept()
    data = bytearray()
    while part := c.recv(65536): data += part
    c.sendall(bytes(reversed(data))); c.close()
"""
CLIENT = """
import socket, sys
c = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
c.sendall(b"x" * 500_000); c.shutdown(socket.SHUT_WR)
got = bytearray()
while part := c.recv(65536): got += part
print(bytes(got[:20]), len(got))
"""


async def everything(stream: GuestStream) -> bytes:
    """All bytes to the end."""
    data = bytearray()
    while part := await stream.read():
        data += part
    return bytes(data)


@needs("ports")
class PortSuite(RuntimeSuite):
    """net.dial and net.listen"""

    async def _server(self, link: GuestLink, address: str = "127.0.0.1") -> tuple[GuestProcess, int]:
        process = await link.start(ProcessSpec(("/usr/bin/python3", "-I", "-S", "-c", SERVER, address)))
        return process, int(await read_until(process, b"\n"))

    async def test_dialling_a_server_inside(self, kit: Kit) -> None:
        link = await kit.started()
        _, port = await self._server(link)
        data = bytes(range(256)) * 2000
        stream = await link.dial(port)
        await stream.write(data)
        await stream.eof()  # half-closed: the answer still comes
        assert await everything(stream) == data[::-1]

    async def test_many_connections_at_once(self, kit: Kit) -> None:
        link = await kit.started()
        _, port = await self._server(link)

        async def one(number: int) -> bytes:
            async with await link.dial(port) as stream:
                await stream.write(b"%d" % number)
                await stream.eof()
                return await everything(stream)

        results = await asyncio.gather(*(one(number) for number in range(100, 130)))
        assert results == [
            b"%d" % int(str(number)[::-1]) if number % 10 else str(number)[::-1].encode()
            for number in range(100, 130)
        ]

    async def test_ipv6_loopback(self, kit: Kit) -> None:
        link = await kit.started()
        _, port = await self._server(link, "::1")
        async with await link.dial(port, "::1") as stream:
            await stream.write(b"ab")
            await stream.eof()
            assert await everything(stream) == b"ba"

    async def test_what_is_refused(self, kit: Kit) -> None:
        link = await kit.started()
        for number, port, address in ((errno.ECONNREFUSED, 9, "127.0.0.1"), (errno.EACCES, 80, "192.0.2.1")):
            with pytest.raises(GuestRefused) as caught:
                await link.dial(port, address)
            assert caught.value.errno == number

    async def test_taking_connections_from_inside(self, kit: Kit) -> None:
        link = await kit.started()
        async with await link.listen() as listener:
            assert listener.port > 0
            process = await link.start(
                ProcessSpec(("/usr/bin/python3", "-I", "-S", "-c", CLIENT, str(listener.port)))
            )
            stream = await listener.accept()
            got = await everything(stream)
            assert got == b"x" * 500_000
            await stream.write(b"answer")
            await stream.eof()
            assert (await finish(process)).text == "b'answer' 6"
            await stream.close()

    async def test_a_closed_listener_refuses(self, kit: Kit) -> None:
        link = await kit.started()
        listener = await link.listen()
        await listener.close()
        end = time.monotonic() + 60
        while time.monotonic() < end:  # CLOSE has no answer
            try:
                stream = await link.dial(listener.port)
            except GuestRefused as refused:
                error = refused
                break
            await stream.close()
        else:
            raise AssertionError("the port still listens")
        assert error.errno == errno.ECONNREFUSED

    @needs("programs")
    async def test_the_door_of_network_mode_egress(self, kit: Kit) -> None:
        """Everything that a door offers listens inside; what ignores it is caught, or reaches nothing."""
        if "egress" not in kit.capabilities.network:
            pytest.skip(f"{LISTED}no network mode egress")
        request = request_for(kit.name)
        network = replace(request.policy.door.network, mode="egress")
        sandbox = await kit.node.create(replace(request, policy=request.policy.with_door(network=network)))
        kit.sandboxes.append(sandbox)
        kit.ids.add(sandbox.id)
        assert (await sandbox.boundary()).network == "egress"
        link = await kit.link(sandbox)
        ports = await doors.open_ports(link)
        await doors.place_bundle(link, b"-----BEGIN CERTIFICATE-----\n")
        process = await link.start(ProcessSpec(("/usr/bin/python3", "-I", "-S", "-c", DOOR)))
        names = ports.names_udp[-1 if not kit.capabilities.transparent else 0]
        question = await names.receive()
        assert question.data == b"name?"
        await names.answer(question.number, b"198.18.0.9")
        stream = await ports.http.accept()
        assert await everything(stream) == b"proxied"
        await stream.close()
        if kit.capabilities.transparent:
            stream = await ports.caught.accept()
            assert stream.peer is not None
            assert stream.peer.destination == ("198.18.0.9", 443)
            assert await everything(stream) == b"caught"
            await stream.close()
        done = await finish(process)
        caught = "True" if kit.capabilities.transparent else "False"
        assert done.text.split() == [caught, "bundle", str(doors.HTTP_PORT)], (done.text, done.stderr)
