"""TLS through the door: passed where its name and certificate are right, opened where requests are judged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from support.doors import LOCAL, LocalDoor, Names, Origin, TestAuthority, local_door


def rule(port: int, **more: Any) -> dict[str, Any]:
    return {"host": "api.example.test", "ports": [port], "addresses": LOCAL} | more


async def tls_through(
    door: LocalDoor, target: str, sni: str | None, ca: str, request: bytes = b"", check: bool = True
) -> bytes:
    """CONNECT to a target, TLS with a name, a request; the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.ports["http"])
    try:
        async with asyncio.timeout(60):
            writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head:
                return head + await reader.read()
            context = ssl.create_default_context(cafile=ca)
            if sni is None or not check:
                context.check_hostname = False
            await writer.start_tls(context, server_hostname=sni)
            writer.write(request)
            return await reader.read(65536)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


async def test_pass_through_reaches_the_host_that_was_named(
    folder: Path, names: Names, secure: Origin, authority: TestAuthority
) -> None:
    names.add("api.example.test", "127.0.0.1")
    async with local_door(folder, {"allow": [rule(secure.port)]}, names, authority.file) as door:
        code, out, err = await door.curl(
            "--cacert", str(authority.file), f"https://api.example.test:{secure.port}/v1"
        )
        assert code == 0, err
        assert json.loads(out.split("\r\n\r\n")[-1])["head"].startswith("GET /v1 HTTP/1.1")
        await door.idle()
        [line] = door.log()
        assert (line["protocol"], line["decision"], line["address"]) == ("tls", "allowed", "127.0.0.1")
        assert line["sent"] > 300 < line["received"]


@pytest.mark.parametrize("sni", ["evil.example.test", "alt.example.test", None])
async def test_pass_through_with_another_name_is_refused(
    folder: Path, names: Names, secure: Origin, authority: TestAuthority, sni: str | None
) -> None:
    names.add("api.example.test", "127.0.0.1")
    async with local_door(folder, {"allow": [rule(secure.port)]}, names, authority.file) as door:
        with pytest.raises((ssl.SSLError, ConnectionError)) as caught:
            await tls_through(door, f"api.example.test:{secure.port}", sni, str(authority.file))
        assert "ACCESS_DENIED" in str(caught.value).upper().replace(" ", "_")
        await door.idle()
        [line] = door.log()
        assert (line["decision"], line["code"]) == ("denied", "sni")
        assert not secure.connections


async def test_pass_through_to_an_address_that_does_not_prove_itself_is_refused(
    folder: Path, names: Names, authority: TestAuthority
) -> None:
    """The name resolves to somebody else's server: neither a right SNI nor the resolver's word is enough."""
    impostor = await Origin().start(authority.server("evil.example.test"))
    names.add("api.example.test", "127.0.0.1")
    async with local_door(folder, {"allow": [rule(impostor.port)]}, names, authority.file) as door:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await tls_through(
                door,
                f"api.example.test:{impostor.port}",
                "api.example.test",
                str(authority.file),
                b"GET",
                False,
            )
        await door.idle()
        assert [line["error"] for line in door.log()] == ["certificate"]
        assert not impostor.requests
    await impostor.stop()


async def test_expired_certificate_is_refused(folder: Path, names: Names, authority: TestAuthority) -> None:
    origin = await Origin().start(authority.server("api.example.test", old=True))
    names.add("api.example.test", "127.0.0.1")
    for mode in ("pass", "inspect"):
        async with local_door(
            folder, {"allow": [rule(origin.port, tls=mode)]}, names, authority.file
        ) as door:
            ca = await door.ca()
            code, out, _ = await door.curl("--cacert", ca, f"https://api.example.test:{origin.port}/")
            assert code != 0 or " 502 " in out
            assert not origin.requests
    await origin.stop()


async def test_inspected_requests_are_judged_one_by_one(
    folder: Path, names: Names, secure: Origin, authority: TestAuthority
) -> None:
    names.add("api.example.test", "127.0.0.1")
    rules = [rule(secure.port, methods=["GET"], paths=["/v1/*"])]
    async with local_door(folder, {"allow": rules}, names, authority.file) as door:
        base = f"https://api.example.test:{secure.port}"
        ca = await door.ca()
        code, out, err = await door.curl("--cacert", ca, f"{base}/v1/models", f"{base}/admin", f"{base}/v1/x")
        assert code == 0, err
        assert [part.split(" ")[1] for part in out.split("HTTP/1.1")[1:] if part.startswith(" ")][:1] == [
            "200"
        ]
        assert out.count("egress_denied") == 1 and "/admin is not among /v1/*" in out
        code, out, _ = await door.curl("--cacert", ca, "-d", "x=1", f"{base}/v1/models")
        assert "POST is not among GET" in out
        assert [head.split(b" ")[1] for head in secure.requests] == [b"/v1/models", b"/v1/x"]
        assert secure.connections == 1  # the denied one in between did not cost the connection
        await door.idle()
        lines = door.log()
        assert [line["code"] for line in lines] == ["allowed", "path", "allowed", "method"]
        assert all(line["rule"].startswith("network.allow[0] api.example.test") for line in lines)


async def test_fronting_behind_a_shared_address_is_stopped_by_inspection_only(
    folder: Path, names: Names, secure: Origin, authority: TestAuthority
) -> None:
    names.add("api.example.test", "127.0.0.1")
    request = b"GET /secret HTTP/1.1\r\nHost: alt.example.test\r\nConnection: close\r\n\r\n"
    target = f"api.example.test:{secure.port}"
    async with local_door(
        folder, {"allow": [rule(secure.port, tls="inspect")]}, names, authority.file
    ) as door:
        got = await tls_through(door, target, "api.example.test", await door.ca(), request)
        assert got.startswith(b"HTTP/1.1 421 ")
        assert b"Host says alt.example.test" in got
        assert not secure.requests
    async with local_door(folder, {"allow": [rule(secure.port)]}, names, authority.file) as door:
        got = await tls_through(door, target, "api.example.test", str(authority.file), request)
        assert got.startswith(b"HTTP/1.1 200 ")  # the control, and the honest limit of pass-through


async def test_untrusted_is_inspected_unless_the_rule_says_otherwise(
    folder: Path, names: Names, secure: Origin, authority: TestAuthority
) -> None:
    names.add("api.example.test", "127.0.0.1")
    url = f"https://api.example.test:{secure.port}/"
    for rules, file in ((rule(secure.port), None), (rule(secure.port, tls="pass"), authority.file)):
        async with local_door(folder, {"allow": [rules]}, names, authority.file, trust="untrusted") as door:
            ca = await door.ca()
            code, _, err = await door.curl("--cacert", str(file or ca), url)
            assert code == 0, err


async def test_pinned_client_is_told_apart_in_the_log(
    folder: Path, names: Names, secure: Origin, authority: TestAuthority
) -> None:
    names.add("api.example.test", "127.0.0.1")
    async with local_door(
        folder, {"allow": [rule(secure.port, tls="inspect")]}, names, authority.file
    ) as door:
        code, _, err = await door.curl(
            "--cacert", str(authority.file), f"https://api.example.test:{secure.port}/"
        )
        assert code == 60, err
        await door.idle()
        [line] = door.log()
        assert line["code"] == "client_tls" and "did not accept" in line["reason"]
        assert not secure.requests


async def test_authority_outlives_the_process_and_is_nobody_elses(
    folder: Path, names: Names, authority: TestAuthority
) -> None:
    async with local_door(folder, {}, names) as door:
        first = await door.engine.authorities.of("sb-1")
        other = await door.engine.authorities.of("sb-2")
        assert first.certificate != other.certificate
    async with local_door(folder, {}, names) as door:
        assert (await door.engine.authorities.of("sb-1")).certificate == first.certificate
        for path in (folder / "authorities").iterdir():
            assert b"PRIVATE" not in path.read_bytes()
            assert path.stat().st_mode & 0o777 == 0o600
        door.engine.authorities.forget("sb-1")
        assert (await door.engine.authorities.of("sb-1")).certificate != first.certificate


async def test_update_leaves_inspected_connections_that_still_may(
    folder: Path, names: Names, secure: Origin, authority: TestAuthority
) -> None:
    names.add("api.example.test", "127.0.0.1")
    rules = {"mode": "egress", "allow": [rule(secure.port, paths=["/v1/*"])]}
    async with local_door(folder, rules, names, authority.file) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.ports["http"])
        target = f"api.example.test:{secure.port}"
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        context = ssl.create_default_context(cafile=await door.ca())
        await writer.start_tls(context, server_hostname="api.example.test")

        async def ask(path: str) -> bytes:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(size)
            return head.split(b" ")[1]

        assert await ask("/v1/x") == b"200"
        assert door.door.update(rules | {"allow": [rule(secure.port, paths=["/v2/*"])]}) == 0
        assert await ask("/v1/x") == b"403"  # the open connection, by the new rules
        assert await ask("/v2/x") == b"200"
        assert door.door.update(rules | {"allow": []}) == 1
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()
