"""Two orchestrators on one PostgreSQL: each is killed beside the other, which goes on."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from faults_world import FULL, Crashes

from support.accounts import disagreements
from support.leaks import Leaks
from support.postgres import PostgresServer, postgres

__all__ = ["postgres"]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="without root no wall here can be frozen")


@pytest.fixture
def pair(postgres: PostgresServer) -> Iterator[tuple[Crashes, Crashes]]:
    with Leaks() as leaks:
        first = Crashes(leaks, postgres.fresh())
        second: Crashes | None = None
        try:
            first.start()
            second = first.beside()
            yield first, second
        finally:
            if second is not None:
                second.stop()
            first.stop()


def test_each_survives_the_others_end(pair: tuple[Crashes, Crashes]) -> None:
    draw = random.Random(5)
    for number in range(6 if FULL else 2):
        killed, living = pair if number % 2 == 0 else pair[::-1]
        living.begin(owner=f"api-{number}-lives", seed=number, seconds=5.0)
        killed.begin(
            owner=f"api-{number}-dies", seed=50 + number, seconds=60.0, die_after=draw.uniform(0.5, 3.0)
        )
        assert killed.result()["killed"], killed.words()
        answer = living.result()
        assert answer["code"] == 0, living.words()
        assert not answer["faults"], answer["faults"][0]
        assert answer["settled"] == "", answer["settled"] + living.words()
        found = disagreements(living.store, living.home)
        assert not found, "\n".join([*found[:20], living.words()])
    answer = pair[0].run(owner="api-last", work=False, clear=True)
    assert answer["settled"] == "", pair[0].words()
    assert not disagreements(pair[0].store, pair[0].home)
