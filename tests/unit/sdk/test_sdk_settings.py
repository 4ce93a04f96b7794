"""Which service, and as whom."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ringfence.model.errors import InvalidRequest
from ringfence.sdk import settings
from ringfence.sdk.settings import Settings


@pytest.fixture(autouse=True)
def nothing_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (settings.URL, settings.KEY, "RINGFENCE_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / "config" / "login.json"
    monkeypatch.setenv(settings.FILE, str(place))
    return place


def test_nothing_is_configured() -> None:
    assert settings.find() is None


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.keep(Settings("http://127.0.0.1:1", "kept"))
    monkeypatch.setenv(settings.URL, "http://127.0.0.1:2")
    found = settings.find()
    assert found is not None
    # The kept key belongs to the kept address: it goes nowhere else.
    assert (found.url, found.key) == ("http://127.0.0.1:2", "")
    monkeypatch.setenv(settings.URL, "http://127.0.0.1:1")
    found = settings.find()
    assert found is not None
    assert found.key == "kept"


def test_arguments_win_over_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.URL, "http://127.0.0.1:2")
    monkeypatch.setenv(settings.KEY, "other")
    found = settings.find("http://127.0.0.1:3", "mine")
    assert found is not None
    assert (found.url, found.key) == ("http://127.0.0.1:3", "mine")


def test_the_word_local_means_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.keep(Settings("http://127.0.0.1:1", "kept"))
    monkeypatch.setenv(settings.URL, "local")
    assert settings.find() is None


def test_the_login_file_is_its_users_alone(nothing_configured: Path) -> None:
    place = settings.keep(Settings("http://127.0.0.1:1", "secret"))
    assert place == nothing_configured
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert sorted(os.listdir(place.parent)) == ["login.json"]
    assert settings.forget()
    assert not settings.forget()
    assert settings.find() is None


def test_a_login_file_that_is_open_to_others_is_refused(nothing_configured: Path) -> None:
    settings.keep(Settings("http://127.0.0.1:1", "secret"))
    assert settings.find() is not None  # the control: as it was written it is taken
    nothing_configured.chmod(0o644)
    with pytest.raises(InvalidRequest, match="open to others") as refused:
        settings.find()
    assert "chmod 600" in refused.value.hint
    assert "secret" not in str(refused.value)


def test_a_broken_login_file_says_what_mends_it(nothing_configured: Path) -> None:
    nothing_configured.parent.mkdir(parents=True)
    nothing_configured.write_text("{nonsense")
    nothing_configured.chmod(0o600)
    with pytest.raises(InvalidRequest, match="no login file") as refused:
        settings.find()
    assert "ringfence login" in refused.value.hint


@pytest.mark.parametrize(
    "url",
    ["", "nowhere", "ftp://host", "http://", "http://user:pw@host", "http://host?key=1", "unix://relative",
     "http://host:99999", "unix://host/path", "http://[::1"],
)  # fmt: skip
def test_an_impossible_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        settings.check(Settings(url))
    assert refused.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:80",
        "https://far.example",
        "unix:///run/x.sock",
        "unix:/run/x.sock",
        "http://localhost",
    ],
)
def test_a_possible_address_is_taken(url: str) -> None:
    assert settings.check(Settings(url, "key")).url == url


def test_a_key_goes_to_another_machine_only_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="unencrypted"):
        settings.find("http://far.example", "key")
    assert settings.find("https://far.example", "key") is not None
    assert settings.find("http://far.example", "") is not None
    monkeypatch.setenv("RINGFENCE_INSECURE", "1")
    assert settings.find("http://far.example", "key") is not None


def test_a_key_that_would_break_a_header_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no key has"):
        settings.check(Settings("http://localhost", "a\r\nX-Evil: 1"))


def test_the_key_is_not_in_the_representation() -> None:
    assert "secret" not in repr(Settings("http://localhost", "secret"))


@pytest.mark.parametrize("host", ["\udcff", "a b", "a,b", "%zz", "[::g]", "x" * 70, "a\x7fb", "*"])
def test_what_no_host_can_be_called_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequest, match="no address of a service") as caught:
        settings.check(Settings(f"http://{host}", insecure=True))
    assert "RINGFENCE_URL" in caught.value.hint


@pytest.mark.parametrize(
    "host", ["a", "a_b.example", "bücher.example", "127.0.0.1", "[::1]", "localhost.", "x-1"]
)
def test_what_a_host_can_be_called(host: str) -> None:
    assert settings.check(Settings(f"https://{host}:8717")).url
