"""The settings of registries, and credentials: what is read, what is refused, and that nothing is told."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from pathlib import Path

import pytest

from ringfence.images import registries, registries_credentials
from ringfence.images.registries import Registries, given, load
from ringfence.model.errors import InvalidRequest

SECRET = "hunter2-never-told"
ANSWER = f"""echo '{{"Username":"u","Secret":"{SECRET}"}}'"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        "XDG_RUNTIME_DIR",
        "XDG_CONFIG_HOME",
        "DOCKER_CONFIG",
        "REGISTRY_AUTH_FILE",
        "RINGFENCE_REGISTRIES",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(registries, "MACHINE", str(tmp_path / "machine.yaml"))
    return tmp_path


def user(home: Path, text: str) -> None:
    folder = home / ".config/ringfence"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "registries.yaml").write_text(text)


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        ("docker.io", ["docker.io/library/x:1"], ["docker.io.evil.example/x", "evil.example/docker.io/x"]),
        (
            "docker.io/library",
            ["docker.io/library/x@sha256:" + "a" * 64],
            ["docker.io/librarian/x", "docker.io/x"],
        ),
        ("*.corp.example", ["a.corp.example/x", "a.b.corp.example/x"], ["corp.example/x", "xcorp.example/x"]),
        ("localhost:5000", ["localhost:5000/x:1"], ["localhost/x", "localhost:5001/x"]),
        ("ghcr.io/team/app", ["ghcr.io/team/app:2"], ["ghcr.io/team/app2"]),
    ],
)
def test_what_is_allowed(pattern: str, allowed: list[str], refused: list[str]) -> None:
    found = Registries(allow=((pattern,),), files=("f",))
    for place in allowed:
        found.check(place)
    for place in refused:
        with pytest.raises(InvalidRequest, match="not allowed"):
            found.check(place)


def test_without_a_list_every_registry_is() -> None:
    load().check("anything.example/x:1")


def test_a_user_can_narrow_what_the_machine_allows_and_never_widen_it(home: Path) -> None:
    (home / "machine.yaml").write_text("allow: [a.example, b.example]\n")
    user(home, "allow: [b.example, c.example]\n")
    found = load()
    found.check("b.example/x")
    for place in ("a.example/x", "c.example/x"):
        with pytest.raises(InvalidRequest, match="not allowed"):
            found.check(place)


def test_an_empty_list_allows_nothing(home: Path) -> None:
    user(home, "allow: []\n")
    with pytest.raises(InvalidRequest, match="not allowed") as caught:
        load().check("docker.io/library/x")
    assert "none at all" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alow: []", "'alow' is no key"),
        ("allow: docker.io", "allow: is no list"),
        ("allow: ['https://docker.io']", "is no registry"),
        ("allow: ['*']", "is no registry"),
        ("insecure: ['*.example']", "is no registry"),
        ("mirrors: [x]", "mirrors: is no mapping"),
        ('mirrors: {docker.io: ["x\\"\\n[[registry]]"]}', "is no registry"),
        ("mirrors: {docker.io/library: [x.example]}", "whole registry"),
        ("- x", "not a mapping"),
        ("allow: [", "is no YAML"),
        ("allow: !!python/object/apply:os.system ['true']", "is no YAML"),
        ("dockerConfig: 3", "is no path"),
    ],
)
def test_settings_that_make_no_sense_stop_everything(home: Path, text: str, message: str) -> None:
    user(home, text)
    with pytest.raises(InvalidRequest, match=message):
        load()


def test_a_file_that_was_named_must_be_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_REGISTRIES", str(home / "nothing"))
    with pytest.raises(InvalidRequest, match="there is no"):
        load()


def docker(home: Path, value: object) -> None:
    (home / ".docker").mkdir(exist_ok=True)
    (home / ".docker/config.json").write_text(json.dumps(value))


def auth(user: str = "u", secret: str = SECRET) -> str:
    return base64.b64encode(f"{user}:{secret}".encode()).decode()


@pytest.mark.parametrize(
    "key", ["docker.io", "https://index.docker.io/v1/", "index.docker.io", "registry-1.docker.io"]
)
def test_the_names_of_the_hub(home: Path, key: str) -> None:
    docker(home, {"auths": {key: {"auth": auth()}}})
    assert registries_credentials.find("docker.io") == {"auth": auth()}
    assert registries_credentials.find("other.example") is None


def test_entries(home: Path) -> None:
    docker(
        home,
        {"auths": {"https://a.example:5000/v2/": {"username": "u", "password": SECRET}, "b.example": {}}},
    )
    assert registries_credentials.find("a.example:5000") == {"auth": auth()}
    assert registries_credentials.find("a.example") is None  # another port is another registry
    assert registries_credentials.find("b.example") is None
    docker(home, {"auths": {"a.example": {"identitytoken": SECRET}}})
    assert registries_credentials.find("a.example") == {"auth": auth("token", ""), "identitytoken": SECRET}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "not what `docker login` writes"),
        ({"auths": []}, None),
        ({"auths": [1]}, "auths makes no sense"),
        ({"auths": {"a.example": {"auth": "!!"}}}, "an entry of auths makes no sense"),
        ({"auths": {"a.example": {"auth": base64.b64encode(SECRET.encode()).decode()}}}, "makes no sense"),
        ({"credsStore": "../../bin/sh"}, "impossible name"),
        ({"credsStore": "-x"}, "impossible name"),
        ({"credHelpers": {"a.example": 3}}, "impossible name"),
        ({"credsStore": "not-there-at-all"}, "is not here"),
    ],
)
def test_logins_that_make_no_sense(home: Path, value: object, message: str | None) -> None:
    docker(home, value)
    if message is None:
        assert registries_credentials.find("a.example") is None
        return
    with pytest.raises(InvalidRequest, match=message) as caught:
        registries_credentials.find("a.example")
    assert SECRET not in str(caught.value.as_dict())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (ANSWER, {"auth": auth()}),
        (ANSWER.replace('"u"', '"<token>"'), {"auth": auth("token", ""), "identitytoken": SECRET}),
        ("echo credentials not found in native keychain; exit 1", None),
        (f"echo {SECRET}", "makes no sense"),
        (f"echo {SECRET} >&2; exit 3", "failed with 3"),
        (f"head -c 2000000 /dev/zero; echo {SECRET}", "makes no sense"),
        (f'test -z "$RINGFENCE_LEAK" && {ANSWER}', {"auth": auth()}),
    ],
)  # fmt: skip
def test_helpers(home: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: object) -> None:
    (home / "bin").mkdir()
    (home / "bin/docker-credential-x").write_text(f"#!/bin/sh\ncat > {home}/asked\n{body}\n")
    (home / "bin/docker-credential-x").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("RINGFENCE_LEAK", "1")
    docker(home, {"credsStore": "x"})
    if isinstance(expected, str):
        with pytest.raises(InvalidRequest, match=expected) as caught:
            registries_credentials.find("docker.io")
        assert SECRET not in str(caught.value.as_dict())
        return
    assert registries_credentials.find("docker.io") == expected
    assert (home / "asked").read_text() == "https://index.docker.io/v1/"


def _in_memory() -> list[str]:
    """Open files of that kind and name."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # what others close meanwhile
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith("/memfd:ringfence ")]


def test_what_skopeo_is_given_lies_in_memory_and_is_gone(home: Path) -> None:
    docker(
        home,
        {
            "auths": {
                "a.example": {"auth": auth()},
                "m.example": {"auth": auth("m")},
                "c.example": {"auth": auth("c")},
            }
        },
    )
    settings = Registries(mirrors={"a.example": ("m.example/hub",)}, insecure=("m.example",))
    with given("a.example/x:1", settings) as made:
        conf, authfile = (Path(path).read_text() for path in (made.before[1], made.after[1]))
        assert len(made.descriptors) == 2
        assert len(_in_memory()) >= 2
    assert _in_memory() == []
    assert json.loads(authfile) == {
        "auths": {"a.example": {"auth": auth()}, "m.example": {"auth": auth("m")}}
    }
    assert 'prefix = "a.example"' in conf and 'location = "m.example/hub"\ninsecure = true' in conf
    with given("b.example/x:1", settings) as made:
        assert made.after == ("--src-no-creds",)
