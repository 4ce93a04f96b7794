"""Programs that people really use, unchanged, in a sandbox whose door leads into the made-up internet."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from ringfence.conformance.harness import request_for
from ringfence.node.service import Node
from support.egress import connected, doors_into
from support.internet import Internet
from support.nodes import run

API, WEB, PACKAGES, GIT = "api.example.test", "web.example.test", "packages.example.test", "git.example.test"
NETWORK = {
    "mode": "egress",
    "allow": [
        {"host": API, "tls": "pass"},
        {"host": WEB, "ports": [80], "protocol": "http"},
        {"host": PACKAGES, "methods": ["GET", "HEAD"], "paths": ["/simple/*", "/npm/*"], "tls": "inspect"},
        {"host": GIT, "tls": "inspect"},
    ],
}
SITE = "/site"

SCRIPTS = {
    "curl": "curl -sS https://api.example.test/from/curl",
    "curl-http1": "curl -sS --http1.1 https://api.example.test/from/curl-http1",
    "curl-http": "curl -sS http://web.example.test/from/curl-http",
    "curl-noproxy": "curl -sS --noproxy '*' https://api.example.test/from/curl-noproxy",
    "curl-socks": "curl -sS -x socks5h://127.0.0.1:61080 https://api.example.test/from/curl-socks",
    "curl-inspected": "curl -sS https://packages.example.test/simple/from/curl-inspected",
    "wget": "wget -q -O - https://api.example.test/from/wget",
    "urllib": """python3 -c '
import urllib.request
print(urllib.request.urlopen("https://api.example.test/from/urllib").read().decode())'""",
    "requests": """python3 -c '
import requests
print(requests.get("https://api.example.test/from/requests").text)'""",
    "httpx": """python3 -c '
import httpx
print(httpx.get("https://api.example.test/from/httpx").text)'""",
    "aiohttp": """python3 -c '
import asyncio, aiohttp
async def main():
    async with aiohttp.ClientSession(trust_env=True) as session:
        async with session.get("https://api.example.test/from/aiohttp") as answer:
            print(await answer.text())
asyncio.run(main())'""",
    # It heeds no proxy variable before version 24: caught on the way.
    "node": """node -e '
fetch("https://api.example.test/from/node").then(a => a.text()).then(console.log)'""",
}
NEEDS = {"curl": "curl", "wget": "wget", "node": "node"}


def site() -> str:
    """Where the test's own Python packages are, to be shown inside."""
    found = importlib.util.find_spec("requests")
    assert found is not None and found.origin is not None
    return str(Path(found.origin).parents[1])


@pytest.mark.parametrize("name", SCRIPTS)
async def test_fetching(name: str, node: Node, internet: Internet, tmp_path: Path) -> None:
    program = NEEDS.get(name.partition("-")[0])
    if program and shutil.which(program, path="/usr/bin:/bin") is None:
        pytest.skip(f"{program} is not installed")
    request = request_for("jail", mounts=[(site(), SITE, True)], env={"PYTHONPATH": SITE})
    async with (
        doors_into(internet, tmp_path / "egress") as doors,
        connected(node, doors, internet, request, NETWORK) as sandbox,
    ):
        result, text = await run(sandbox, "/bin/sh", "-c", SCRIPTS[name])
    assert result.end.exit_code == 0, text
    answer = json.loads(text.strip().splitlines()[-1])
    assert answer["path"].endswith(f"/from/{name}")
    assert answer["host"] in SCRIPTS[name]


def wheel() -> bytes:
    """A package for pip: one module."""
    data = io.BytesIO()
    about = "demo_ringfence-1.0.dist-info"
    module = b"WORD = 'installed'\n"
    info = {
        "demo_ringfence.py": module,
        f"{about}/METADATA": b"Metadata-Version: 2.1\nName: demo-ringfence\nVersion: 1.0\n",
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    with zipfile.ZipFile(data, "w") as file:
        for path, content in info.items():
            file.writestr(path, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(content)}")
        lines.append(f"{about}/RECORD,,")
        file.writestr(f"{about}/RECORD", "\n".join(lines) + "\n")
    return data.getvalue()


async def test_pip(node: Node, internet: Internet, tmp_path: Path) -> None:
    name = "demo_ringfence-1.0-py3-none-any.whl"
    internet.publish(PACKAGES, "simple/demo-ringfence/index.html", f'<a href="{name}">{name}</a>'.encode())
    internet.publish(PACKAGES, f"simple/demo-ringfence/{name}", wheel())
    async with (
        doors_into(internet, tmp_path / "egress") as doors,
        connected(node, doors, internet, request_for("jail"), NETWORK) as sandbox,
    ):
        result, text = await run(
            sandbox, "/bin/sh", "-c",
            f"python3 -m pip install -q --no-cache-dir --disable-pip-version-check --target got "
            f"--index-url https://{PACKAGES}/simple demo-ringfence && "
            "PYTHONPATH=got python3 -c 'import demo_ringfence; print(demo_ringfence.WORD)'",
        )  # fmt: skip
        assert (result.end.exit_code, text.strip().splitlines()[-1:]) == (0, ["installed"]), text
        # What the rule does not name can't be had there.
        _, text = await run(sandbox, "curl", "-sS", f"https://{PACKAGES}/upload")
        assert json.loads(text)["error"]["code"] == "egress_denied", text


@pytest.mark.skipif(shutil.which("npm", path="/usr/bin") is None, reason="npm is not installed")
async def test_npm(node: Node, internet: Internet, tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path, content in (
            ("package/package.json", b'{"name": "demo-ringfence", "version": "1.0.0", "main": "index.js"}'),
            ("package/index.js", b"module.exports = 'installed'\n"),
        ):
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    tarball = f"https://{PACKAGES}/npm/demo-ringfence-1.0.0.tgz"
    version = {
        "name": "demo-ringfence",
        "version": "1.0.0",
        "dist": {"tarball": tarball, "shasum": hashlib.sha1(archive.getvalue()).hexdigest()},
    }
    packument = {"name": "demo-ringfence", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    internet.publish(PACKAGES, "npm/demo-ringfence", json.dumps(packument).encode())
    internet.publish(PACKAGES, "npm/demo-ringfence-1.0.0.tgz", archive.getvalue())
    async with (
        doors_into(internet, tmp_path / "egress") as doors,
        connected(node, doors, internet, request_for("jail", max_processes=512), NETWORK) as sandbox,
    ):
        result, text = await run(
            sandbox, "/bin/sh", "-c",
            f"npm install --no-audit --no-fund --no-update-notifier --registry https://{PACKAGES}/npm/ "
            "demo-ringfence >&2 && node -p \"require('demo-ringfence')\"",
        )  # fmt: skip
    assert (result.end.exit_code, text.strip().splitlines()[-1:]) == (0, ["installed"]), text


async def test_git_over_https(node: Node, internet: Internet, tmp_path: Path) -> None:
    source, bare = tmp_path / "source", tmp_path / "demo.git"
    environment = {
        **os.environ, "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.test",
        "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.test",
    }  # fmt: skip
    source.mkdir()
    (source / "README").write_text("cloned\n")
    for command in (
        ("init", "-q", "-b", "main", "."),
        ("add", "README"),
        ("commit", "-q", "-m", "first"),
        ("clone", "-q", "--bare", ".", str(bare)),
        ("--git-dir", str(bare), "update-server-info"),
    ):
        subprocess.run(["git", *command], cwd=source, check=True, env=environment)
    for path in bare.rglob("*"):
        if path.is_file():
            internet.publish(GIT, f"demo.git/{path.relative_to(bare)}", path.read_bytes())
    async with (
        doors_into(internet, tmp_path / "egress") as doors,
        connected(node, doors, internet, request_for("jail"), NETWORK) as sandbox,
    ):
        result, text = await run(
            sandbox, "/bin/sh", "-c", f"git clone -q https://{GIT}/demo.git && cat demo/README"
        )
    assert (result.end.exit_code, text.strip().splitlines()[-1:]) == (0, ["cloned"]), text


JAVA = """
import java.net.*;
class Fetch {
    public static void main(String[] args) throws Exception {
        var stream = new URL("http://web.example.test/from/java").openConnection().getInputStream();
        System.out.println(new String(stream.readAllBytes()));
    }
}
"""


@pytest.mark.skipif(shutil.which("java", path="/usr/bin") is None, reason="Java is not installed")
async def test_java(node: Node, internet: Internet, tmp_path: Path) -> None:
    """Its variables lead to the proxy; its store of authorities is its own, so plain HTTP is shown."""
    real = Path("/usr/bin/java").resolve()
    settings = [path for path in Path("/etc").glob("java-*-openjdk") if path.is_dir()]
    mounts = [(str(path), str(path), True) for path in settings]
    request = request_for("jail", mounts=mounts, memory=2 << 30, max_processes=512)
    async with (
        doors_into(internet, tmp_path / "egress") as doors,
        connected(node, doors, internet, request, NETWORK) as sandbox,
    ):
        await (await sandbox.link()).files.write("/workspace/Fetch.java", JAVA.encode())
        result, text = await run(sandbox, str(real), "-Xmx256m", "/workspace/Fetch.java")
    assert result.end.exit_code == 0, text
    assert json.loads(text.strip().splitlines()[-1])["path"] == "/from/java"
