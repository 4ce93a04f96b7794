"""Keys: who gets in, who no longer does, and how soon, on both stores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ringfence.control.principals import Principal
from ringfence.control.tenancy import KEY, NewKey, Tenancy
from ringfence.model.errors import (
    Conflict,
    InvalidRequest,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    RateLimited,
    StoreUnavailable,
)
from ringfence.store.contract import Store
from ringfence.store.opening import open_store

PATIENCE = 60.0
LONG = 100_000.0  # a cache's life that no test waits for


@pytest_asyncio.fixture
async def stores(ringfence_store_address: str) -> AsyncIterator[list[Store]]:
    """Two processes' view of one store."""
    opened = [await open_store(ringfence_store_address) for _ in range(2)]
    yield opened
    for store in opened:
        await store.close()


@pytest_asyncio.fixture
async def tenancies(stores: list[Store]) -> AsyncIterator[list[Tenancy]]:
    """One of each, whose caches forget only what they are told to."""
    made = [Tenancy(store, cache_life=LONG) for store in stores]
    yield made
    for tenancy in made:
        await tenancy.close()


@pytest.fixture
def tenancy(tenancies: list[Tenancy]) -> Tenancy:
    return tenancies[0]


@pytest_asyncio.fixture
async def first(tenancy: Tenancy) -> NewKey:
    made = await tenancy.first_start()
    assert made is not None
    return made


async def refused(tenancy: Tenancy, secret: str | None) -> bool:
    try:
        await tenancy.authenticate(secret)
    except NotAuthenticated:
        return True
    return False


async def eventually(what: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await what():
            await asyncio.sleep(0.01)


async def test_the_first_start_makes_one_key(tenancies: list[Tenancy]) -> None:
    made = await asyncio.gather(*(tenancies[number % 2].first_start() for number in range(8)))
    (key,) = [one for one in made if one is not None]
    assert key.secret.startswith(f"rf_{key.key.id}_")
    for tenancy in tenancies:
        principal = await tenancy.authenticate(key.secret)
        assert principal == Principal("default", "default", "operator", key.key.id, ("admin",), True)
        assert principal.may("read") and principal.may("run") and principal.may("admin")
        principal.require_operator()
        assert await tenancy.first_start() is None


async def test_what_is_no_key_is_refused(tenancy: Tenancy, first: NewKey) -> None:
    secret = first.secret
    assert not await refused(tenancy, secret)  # the control
    _, id, rest = secret.split("_")
    other = (await tenancy.make_key("default")).secret
    for wrong in (
        None,
        "",
        " ",
        "rf_",
        id,
        rest,
        f"rf_{id}_",
        f"rf__{rest}",
        secret[:-1],
        secret + "0",
        secret + "\n",
        " " + secret,
        secret.upper(),
        secret.replace("rf_", "xx_"),
        f"rf_{id}_{'0' * 64}",
        f"rf_{id}_{other.split('_')[2]}",
        f"rf_{other.split('_')[1]}_{rest}",
        f"rf_{'0' * 20}_{rest}",
        f"rf_{id}\0_{rest}",
        "\ud800",
        "rf_" + "ü" * 20 + "_" + rest,
        "x" * 1_000_000,
        f"rf_{id}_{rest[:-1]}{'0' if rest[-1] != '0' else '1'}",
    ):
        assert await refused(tenancy, wrong), wrong
    # Nobody learns whether it was the id or the secret.
    messages = set()
    for wrong in (f"rf_{id}_{'0' * 64}", f"rf_{'0' * 20}_{rest}", "nonsense"):
        with pytest.raises(NotAuthenticated) as told:
            await tenancy.authenticate(wrong)
        messages.add((told.value.message, told.value.hint))
    assert len(messages) == 1


async def test_the_store_does_not_know_the_secret(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "store.db"))
    tenancy = Tenancy(store)
    made = await tenancy.first_start()
    assert made is not None
    await tenancy.authenticate(made.secret)
    again = await tenancy.rotate_key("default", made.key.id, overlap=10)
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    for key in (made, again):
        assert key.key.id.encode() in content  # the control: the rows are there
        assert key.secret.split("_")[2].encode() not in content
        assert key.secret not in repr(await tenancy.keys("default"))
        assert key.secret not in repr(await store.events())
    await tenancy.close()
    await store.close()


async def test_scopes(tenancy: Tenancy, first: NewKey) -> None:
    for scopes, may in (
        (["read"], {"read"}),
        (["run"], {"read", "run"}),
        (["run", "read"], {"read", "run"}),
        (["admin"], {"read", "run", "admin"}),
    ):
        made = await tenancy.make_key("default", scopes=scopes)
        principal = await tenancy.authenticate(made.secret)
        assert {scope for scope in ("read", "run", "admin") if principal.may(scope)} == may
        for scope in {"read", "run", "admin"} - may:
            with pytest.raises(NotAllowed, match=scope):
                principal.require(scope)
        with pytest.raises(NotAllowed):
            principal.require_operator()
    for scopes in ([], ["root"], ["read", ""], ["READ"]):
        with pytest.raises(InvalidRequest):
            await tenancy.make_key("default", scopes=scopes)


async def test_nobody_gives_what_he_has_not(tenancy: Tenancy, first: NewKey) -> None:
    run = await tenancy.authenticate((await tenancy.make_key("default", scopes=["run"])).secret)
    admin = await tenancy.authenticate((await tenancy.make_key("default", scopes=["admin"])).secret)
    with pytest.raises(NotAllowed):
        await tenancy.make_key("default", scopes=["admin"], by=run)
    await tenancy.make_key("default", scopes=["admin"], by=admin)
    # An administrator of the operator's project does not become operator.
    with pytest.raises(NotAllowed):
        await tenancy.rotate_key("default", first.key.id, by=admin)
    with pytest.raises(NotAllowed):
        await tenancy.revoke_key("default", first.key.id, by=admin)
    assert not await refused(tenancy, first.secret)
    operator = await tenancy.authenticate(first.secret)
    made = await tenancy.rotate_key("default", first.key.id, by=operator)
    assert (await tenancy.authenticate(made.secret)).operator


async def test_a_key_ends_in_time(tenancies: list[Tenancy], first: NewKey) -> None:
    made = await tenancies[0].make_key("default", expires=time.time() + 5)
    with pytest.raises(InvalidRequest):
        await tenancies[0].make_key("default", expires=time.time() - 1)
    for tenancy in tenancies:  # cached for long, and over nevertheless
        await eventually(lambda tenancy=tenancy: refused(tenancy, made.secret))
    assert (await tenancies[0].key("default", made.key.id)).state == "expired"
    with pytest.raises(NotAuthenticated, match="expired"):
        await tenancies[0].authenticate(made.secret)
    assert await tenancies[0].forget_keys(time.time()) == 1
    with pytest.raises(NotFound):
        await tenancies[0].key("default", made.key.id)
    assert not await refused(tenancies[1], first.secret)


async def test_revoked_is_revoked_here_at_once(tenancy: Tenancy, first: NewKey) -> None:
    made = await tenancy.make_key("default")
    assert not await refused(tenancy, made.secret)
    gone = await tenancy.revoke_key("default", made.key.id)
    assert await refused(tenancy, made.secret)
    assert gone.state == "revoked"
    assert (await tenancy.revoke_key("default", made.key.id)).state == "revoked"
    assert [key.state for key in await tenancy.keys("default")] == ["active", "revoked"]


async def test_and_in_every_other_process(tenancies: list[Tenancy], first: NewKey) -> None:
    here, there = tenancies
    for _ in range(5):
        made = await here.make_key("default")
        assert not await refused(there, made.secret)  # in its cache, for long
        await here.revoke_key("default", made.key.id)
        await eventually(lambda made=made: refused(there, made.secret))
    assert not await refused(there, first.secret)


async def test_rotation(tenancies: list[Tenancy], first: NewKey) -> None:
    here, there = tenancies
    made = await here.make_key("default", name="ci", user="eve", scopes=["run"])
    assert not await refused(there, made.secret)
    second = await here.rotate_key("default", made.key.id, overlap=1.0)
    assert second.secret != made.secret
    assert (second.key.name, second.key.user, second.key.scopes) == ("ci", "eve", ("run",))
    old = await here.key("default", made.key.id)
    assert old.replaced_by == second.key.id
    assert old.expires is not None
    for tenancy in tenancies:
        assert not await refused(tenancy, second.secret)
        await eventually(lambda tenancy=tenancy: refused(tenancy, made.secret))
        assert time.time() >= old.expires  # not a moment before the overlap was over
        assert not await refused(tenancy, second.secret)
    third = await here.rotate_key("default", second.key.id)
    assert await refused(here, second.secret)
    assert not await refused(here, third.secret)
    for id in (made.key.id, second.key.id):  # once only, and never what is over
        with pytest.raises(InvalidRequest):
            await here.rotate_key("default", id)
    for overlap in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest):
            await here.rotate_key("default", third.key.id, overlap=overlap)


async def test_rotation_never_lengthens_a_life(tenancy: Tenancy, first: NewKey) -> None:
    expires = time.time() + 1000
    made = await tenancy.make_key("default", expires=expires)
    second = await tenancy.rotate_key("default", made.key.id, overlap=100_000)
    assert second.key.expires == expires
    assert (await tenancy.key("default", made.key.id)).expires == expires


async def test_of_two_rotations_one_happens(tenancies: list[Tenancy], first: NewKey) -> None:
    made = await tenancies[0].make_key("default")
    results = await asyncio.gather(
        *(tenancies[number % 2].rotate_key("default", made.key.id, overlap=60) for number in range(4)),
        return_exceptions=True,
    )
    assert sum(isinstance(one, NewKey) for one in results) == 1
    assert all(isinstance(one, NewKey | InvalidRequest) for one in results)
    assert len(await tenancies[0].keys("default")) == 3


async def test_revoked_while_it_is_looked_up(stores: list[Store], first: NewKey) -> None:
    class Slow:
        """Reads at once and answers late."""

        def __init__(self, store: Store) -> None:
            self.store, self.read, self.answer = store, asyncio.Event(), asyncio.Event()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        async def get(self, kind: str, id: str) -> Any:
            row = await self.store.get(kind, id)
            if kind == KEY:
                self.read.set()
                await self.answer.wait()
            return row

    slow = Slow(stores[1])
    tenancy = Tenancy(slow, cache_life=LONG)  # type: ignore[arg-type]
    other = Tenancy(stores[0])
    made = await other.make_key("default")
    asking = asyncio.create_task(tenancy.authenticate(made.secret))
    await slow.read.wait()
    heard = tenancy._keys._changes
    await other.revoke_key("default", made.key.id)

    async def told() -> bool:
        return tenancy._keys._changes > heard

    await eventually(told)
    slow.answer.set()
    await asking  # it was good when it was asked for
    await eventually(lambda: refused(tenancy, made.secret))  # and is not kept as what it was
    await tenancy.close()
    await other.close()


async def test_the_cache_ends_by_itself(stores: list[Store], first: NewKey) -> None:
    class Deaf:
        """Never hears of a change."""

        def __init__(self, store: Store) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        async def watch(self) -> AsyncIterator[tuple[str, str]]:
            await asyncio.Event().wait()
            yield ("", "")

    tenancy, other = Tenancy(Deaf(stores[1]), cache_life=0.3), Tenancy(stores[0])  # type: ignore[arg-type]
    made = await other.make_key("default")
    await tenancy.authenticate(made.secret)
    await other.revoke_key("default", made.key.id)
    await eventually(lambda: refused(tenancy, made.secret))
    await tenancy.close()
    await other.close()


async def test_a_store_that_is_away_lets_nobody_in(stores: list[Store], first: NewKey) -> None:
    tenancy = Tenancy(stores[1], cache_life=0.0)
    await tenancy.authenticate(first.secret)
    await asyncio.gather(*tenancy._writing)
    await stores[1].close()
    with pytest.raises(StoreUnavailable):
        await tenancy.authenticate(first.secret)
    await tenancy.close()


async def test_what_belongs_to_another_project(tenancy: Tenancy, first: NewKey) -> None:
    organisation = await tenancy.make_organisation("acme")
    project = await tenancy.make_project(organisation, "web")
    made = await tenancy.make_key(project.id, scopes=["admin"])
    principal = await tenancy.authenticate(made.secret)
    assert (principal.organisation, principal.project, principal.operator) == (
        organisation,
        project.id,
        False,
    )
    assert [key.id for key in await tenancy.keys(project.id)] == [made.key.id]
    for call in (tenancy.key, tenancy.rotate_key, tenancy.revoke_key):
        with pytest.raises(NotFound):
            await call(project.id, first.key.id)
        with pytest.raises(NotFound):
            await call("default", made.key.id)
    assert not await refused(tenancy, first.secret)
    assert not await refused(tenancy, made.secret)
    for id in ("nothing", "\0", "x" * 10_000):
        with pytest.raises(NotFound):
            await tenancy.key(project.id, id)
        with pytest.raises(NotFound):
            await tenancy.make_key(id)


async def test_organisations_and_projects(tenancies: list[Tenancy]) -> None:
    here, there = tenancies
    one, two = await here.make_organisation("one"), await there.make_organisation("two")
    with pytest.raises(Conflict):
        await there.make_organisation("one")
    made = [await here.make_project(one, f"p{number}") for number in range(5)]
    with pytest.raises(Conflict):
        await there.make_project(one, "p3")
    other = await there.make_project(two, "p3")
    assert await there.projects(one) == made
    assert await there.projects(two) == [other]
    assert await there.projects(after=made[1].id, limit=2) == made[2:4]
    assert await there.project(other.id) == other
    with pytest.raises(NotFound):
        await here.make_project("org-nothing", "web")
    for name in ("", "-a", "a-", "A", "a b", "a/b", "a" * 64, "ü", "a\0", "../etc"):
        with pytest.raises(InvalidRequest):
            await here.make_project(one, name)
        with pytest.raises(InvalidRequest):
            await here.make_organisation(name)


async def test_when_it_was_last_used(tenancy: Tenancy, first: NewKey) -> None:
    before = time.time()
    assert (await tenancy.key("default", first.key.id)).used is None
    for _ in range(20):
        await tenancy.authenticate(first.secret)

    async def noted() -> bool:
        used = (await tenancy.key("default", first.key.id)).used
        return used is not None and used >= before

    await eventually(noted)
    assert [key.used is not None for key in await tenancy.keys("default")] == [True]
    assert await tenancy.store.get("key_used", first.key.id) == (await tenancy.store.find("key_used"))[0]
    assert (await tenancy.store.find("key_used"))[0].revision == 1  # once a minute, not with every use
    assert (await tenancy.store.get(KEY, first.key.id)).revision == 1  # and never in the key's own way


async def test_what_happens_to_keys_is_told(tenancy: Tenancy, first: NewKey) -> None:
    operator = await tenancy.authenticate(first.secret)
    made = await tenancy.make_key("default", by=operator)
    second = await tenancy.rotate_key("default", made.key.id, by=operator)
    await tenancy.revoke_key("default", second.key.id, by=operator)
    told = [(event.name, event.subject) for event in await tenancy.store.events(project="default")]
    assert told == [
        ("key.made", first.key.id),
        ("key.made", made.key.id),
        ("key.rotated", made.key.id),
        ("key.revoked", second.key.id),
    ]
    assert all(
        event.data["by"] == first.key.id for event in (await tenancy.store.events(project="default"))[1:]
    )


async def test_requests_a_second(tenancy: Tenancy, first: NewKey) -> None:
    principal = await tenancy.authenticate(first.secret)
    await tenancy.quotas.set("default", {"requests": 0.001, "burst": 5})
    for _ in range(5):
        await tenancy.admit_request(principal)
    with pytest.raises(RateLimited) as told:
        await tenancy.admit_request(principal)
    assert told.value.details["retry_after"] > 0
    # Another project has a bucket of its own.
    await tenancy.admit_request(Principal("default", "other"))
    await tenancy.quotas.set("default", {"requests": 1000.0})

    async def again() -> bool:
        try:
            await tenancy.admit_request(principal)
        except RateLimited as late:
            return not late.details["retry_after"] < 1  # soon
        return True

    await eventually(again)
    await tenancy.quotas.set("default", {"requests": None})
    for _ in range(100):
        await tenancy.admit_request(principal)
