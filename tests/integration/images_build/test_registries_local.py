"""A registry of the test's own, with passwords: credentials, mirrors, the list of what is allowed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ringfence.images import importing
from ringfence.images.importing import ImportOptions
from ringfence.images.store import TemplateStore
from ringfence.model.errors import HostLimit, InvalidRequest, RingfenceError
from support import images

USER, PASSWORD = "builder", "correct-horse-4711"


class Registry(NamedTuple):
    host: str
    log: Path

    def requests(self) -> int:
        return self.log.read_text().count("http.request.method") if self.log.exists() else 0


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    images.need("docker-registry", "htpasswd", "skopeo")
    layout = images.layout()
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    passwords = subprocess.run(
        ["htpasswd", "-Bbn", USER, PASSWORD], capture_output=True, text=True, check=True
    ).stdout
    (folder / "htpasswd").write_text(passwords)
    config = {
        "version": 0.1,
        "log": {"level": "debug"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": f"127.0.0.1:{port}"},
        "auth": {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}},
    }
    (folder / "config.yml").write_text(json.dumps(config))
    log = folder / "log"
    program = shutil.which("docker-registry")
    with open(log, "wb") as words:
        server = subprocess.Popen(
            [str(program), "serve", str(folder / "config.yml")], stdout=words, stderr=words, cwd=folder
        )
    try:
        host = f"127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 5).close()
                break
            except OSError:
                assert time.monotonic() < deadline and server.poll() is None, log.read_text()
                time.sleep(0.05)
        for name in ("team/tools:1", "hub/tools:1"):
            subprocess.run(
                ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"--dest-creds={USER}:{PASSWORD}",
                 f"oci:{layout}:1", f"docker://{host}/{name}"],
                check=True, timeout=100,
            )  # fmt: skip
        yield Registry(host, log)
    finally:
        server.kill()
        server.wait()


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without any login."""
    home = tmp_path / "home"
    home.mkdir()
    for name in (
        "XDG_RUNTIME_DIR",
        "XDG_CONFIG_HOME",
        "DOCKER_CONFIG",
        "REGISTRY_AUTH_FILE",
        "RINGFENCE_REGISTRIES",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TemplateStore]:
    with TemplateStore.open(tmp_path / "images") as made:
        yield made


def add(store: TemplateStore, place: str, **options: object) -> str:
    return importing.add(store, f"oci:{place}", ImportOptions(**options)).template.digest  # type: ignore[arg-type]


def login(home: Path, host: str, password: str = PASSWORD) -> None:
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    (home / ".docker").mkdir(exist_ok=True)
    (home / ".docker/config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


def settings(home: Path, **values: object) -> None:
    folder = home / ".config/ringfence"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "registries.yaml").write_text(json.dumps(values))


def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    program = tmp_path / "bin" / "docker-credential-test"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_without_credentials_it_is_refused_and_says_so(registry: Registry, store: TemplateStore) -> None:
    with pytest.raises(HostLimit, match="does not let us have") as caught:
        add(store, f"{registry.host}/team/tools:1", insecure=True)
    assert "log in" in caught.value.hint
    assert store.names() == []


def test_a_login_of_docker_is_used(registry: Registry, store: TemplateStore, nobody: Path) -> None:
    login(nobody, registry.host)
    assert add(store, f"{registry.host}/team/tools:1", insecure=True).startswith("sha256:")
    assert store.names() == ["team/tools:1"]


def test_a_wrong_password_is_named_and_never_printed(
    registry: Registry, store: TemplateStore, nobody: Path
) -> None:
    login(nobody, registry.host, "wrong-battery")
    with pytest.raises(HostLimit, match="does not let us have") as caught:
        add(store, f"{registry.host}/team/tools:1", insecure=True)
    text = f"{caught.value.message} {caught.value.hint} {caught.value.details}"
    assert "wrong-battery" not in text
    assert base64.b64encode(b"wrong-battery").decode() not in text


def test_a_helper_is_asked(
    registry: Registry, store: TemplateStore, nobody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(
        tmp_path, monkeypatch,
        f"read server; test \"$1\" = get && test \"$server\" = {registry.host} &&"
        f""" echo '{{"ServerURL":"x","Username":"{USER}","Secret":"{PASSWORD}"}}'""",
    )  # fmt: skip
    (nobody / ".docker").mkdir()
    (nobody / ".docker/config.json").write_text(json.dumps({"credHelpers": {registry.host: "test"}}))
    assert add(store, f"{registry.host}/team/tools:1", insecure=True)
    (nobody / ".docker/config.json").write_text(json.dumps({"credsStore": "test"}))
    assert add(store, f"{registry.host}/team/tools:1", insecure=True, name="again")


def test_a_helper_that_fails_is_named_and_what_it_says_is_not(
    registry: Registry, store: TemplateStore, nobody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(tmp_path, monkeypatch, "cat > /dev/null; echo s3cret; echo s3cret >&2; exit 7")
    (nobody / ".docker").mkdir()
    (nobody / ".docker/config.json").write_text(json.dumps({"credHelpers": {registry.host: "test"}}))
    before = registry.requests()
    with pytest.raises(InvalidRequest, match="docker-credential-test failed with 7") as caught:
        add(store, f"{registry.host}/team/tools:1", insecure=True)
    assert "s3cret" not in str(caught.value.as_dict())
    assert registry.requests() == before


def test_what_is_not_allowed_is_refused_before_any_connection(
    registry: Registry, store: TemplateStore, nobody: Path
) -> None:
    login(nobody, registry.host)
    settings(nobody, allow=["docker.io/library", f"{registry.host}/hub"])
    before = registry.requests()
    with pytest.raises(InvalidRequest, match="not allowed") as caught:
        add(store, f"{registry.host}/team/tools:1", insecure=True)
    assert "registries.yaml" in caught.value.hint and "docker.io/library" in caught.value.hint
    assert registry.requests() == before
    assert add(store, f"{registry.host}/hub/tools:1", insecure=True)  # the control: allowed, and connected to
    assert registry.requests() > before


def test_a_mirror_is_used(registry: Registry, store: TemplateStore, nobody: Path) -> None:
    login(nobody, registry.host)
    settings(nobody, mirrors={"registry.invalid": [f"{registry.host}/hub"]}, insecure=[registry.host])
    assert add(store, "registry.invalid/tools:1")
    settings(nobody, insecure=[registry.host])  # the control: without the mirror there is no such registry
    with pytest.raises(RingfenceError, match=r"can't fetch registry\.invalid"):
        add(store, "registry.invalid/tools:1")


def test_insecure_must_be_said(registry: Registry, store: TemplateStore, nobody: Path) -> None:
    login(nobody, registry.host)
    with pytest.raises(HostLimit, match="certificate"):
        add(store, f"{registry.host}/team/tools:1")
    settings(nobody, insecure=[registry.host])
    assert add(store, f"{registry.host}/team/tools:1")


def test_credentials_are_never_on_a_command_line_or_a_disk(
    registry: Registry, store: TemplateStore, nobody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which("skopeo")
    spy = tmp_path / "spy"
    spy.mkdir()
    lines = [
        "#!/bin/sh",
        f'printf "%s\\n" "$@" > {spy}/argv',
        f"env > {spy}/env",
        f"find {tmp_path}/images -type f -exec grep -l auths {{}} + > {spy}/files",
        f'exec {real} "$@"',
    ]
    (spy / "skopeo").write_text("\n".join(lines) + "\n")
    (spy / "skopeo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{spy}:{os.environ['PATH']}")
    login(nobody, registry.host)
    assert add(store, f"{registry.host}/team/tools:1", insecure=True)
    encoded = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    for name in ("argv", "env"):
        text = (spy / name).read_text()
        assert PASSWORD not in text and encoded not in text
    assert (spy / "files").read_text() == ""
