"""A server takes the weights of one run at a time, and says of which."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_server import (
    Caller,
    ObedientEngine,
    Run,
    make_offer,
    make_request,
    make_service,
    make_settings,
    serving,
    serving_engine,
)

from rollout_actors.backends import rollmatch_server
from rollout_actors.server import messages
from rollout_actors.server.app import make_app
from rollout_actors.server.lease import OWNER_FILE, RUN_HEADER, Lease, decoded, encoded, run_name
from shared.errors import RolloutError, WeightSyncError
from shared.weight_sync.phases import SyncPhase

FIRST, SECOND = "/runs/first of a@h", "/runs/second of b@h"


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def test_another_run_gets_the_lease_when_the_first_has_ended_it_or_has_not_called_for_its_time():
    clock = Clock()
    lease = Lease(60.0, clock_s=clock)
    assert lease.take(FIRST) == ""
    for _ in range(3):
        clock.now_s += 59
        lease.renew(SECOND)  # does nothing
        lease.end(SECOND)
        for other in (SECOND, ""):
            refusal = lease.take(other)
            assert f"the run {FIRST} since 20" in refusal
            assert "(last call 59 s ago)" in refusal and "lease_s = 60 s" in refusal
        assert lease.taken(FIRST) == ""
        lease.renew(FIRST)
    clock.now_s += 61
    assert lease.take(SECOND) == ""
    assert f"the run {SECOND} since" in lease.take(FIRST)
    lease.end(SECOND)
    assert lease.take(FIRST) == ""


def test_a_call_that_is_not_answered_yet_keeps_the_lease_however_long_it_takes():
    clock = Clock()
    lease = Lease(60.0, clock_s=clock)
    lease.take(FIRST)
    with lease.call(FIRST):
        clock.now_s += 1000
        assert f"the run {FIRST} since" in lease.take(SECOND)
    clock.now_s += 59
    assert f"the run {FIRST} since" in lease.take(SECOND)
    clock.now_s += 2
    assert lease.take(SECOND) == ""


def test_a_run_has_its_name_again_on_any_machine_with_its_folder_and_its_header_is_ascii(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = Path("läufe/1")
    before = run_name(folder)
    assert not folder.exists() and run_name(folder) != before, "a check makes nothing"
    name = run_name(folder, is_start=True)
    assert name.startswith(f"{tmp_path}/läufe/1 of ")
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert {run_name(folder), run_name(folder.absolute(), is_start=True)} == {name}
    (folder / OWNER_FILE).unlink()
    assert run_name(folder, is_start=True) != name, "another folder of this path"
    assert (encoded(name).isascii(), decoded(encoded(name)), decoded(None)) == (True, name, "")


@pytest.fixture
def url(tmp_path):
    with serving_engine(ObedientEngine(), make_settings(tmp_path / "model"), token="t") as url:
        yield url


def test_the_second_run_is_refused_at_its_start_and_in_its_sync_until_the_first_has_ended(
    url, tmp_path
):
    def start(name):
        return Run(url, make_settings(tmp_path / "model")).start(token="t", run=name)

    first, late = start(FIRST), start(SECOND)  # while nobody has sent weights
    first.sync(make_offer())
    with pytest.raises(WeightSyncError, match=f"it has served the run {FIRST} since 20"):
        late.sync(make_offer())
    with pytest.raises(RolloutError, match=f"does not suit .* served the run {FIRST}"):
        start(SECOND)
    assert first.generate(make_request(0))
    again = start(FIRST)  # as after `resume=auto`
    again.sync(make_offer(2))
    again.client.close()
    late.sync(make_offer())


def test_only_calls_with_the_token_renew_it_and_a_caller_of_no_run_needs_none(tmp_path):
    clock = Clock()
    service = make_service(ObedientEngine(), make_settings(tmp_path / "model"))
    service.lease = Lease(60.0, clock_s=clock)
    asyncio.run(service.start())
    key = {"Authorization": "Bearer t"}
    header = {RUN_HEADER: encoded(FIRST)}
    pause = messages.SyncCall.of(SyncPhase.PAUSE, make_offer(), "a run").body()
    with serving(make_app(service, token="t")) as url:
        caller = Caller(url)

        def pauses(**headers):
            return caller.post("/sync/pause/", pause, **key, **headers).status_code

        assert pauses(**header) == 200
        for headers, left in ((key | header, 409), (header, 200), (key, 200)):
            clock.now_s += 40
            assert caller.get("/health/", **headers).status_code == 200
            clock.now_s += 40
            assert pauses() == left
            assert pauses(**header) == 200
        assert caller.post("/end_lease/", b"", **key, **header).status_code == 200
        assert pauses() == 200


def test_a_run_that_asks_for_nothing_keeps_its_lease_as_long_as_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(rollmatch_server, "HEARTBEAT_S", 0.01)
    clock = Clock()
    settings = make_settings(tmp_path / "model")
    service = make_service(ObedientEngine(), settings)
    service.lease = Lease(60.0, clock_s=clock)
    asyncio.run(service.start())

    async def live(client):
        await client.start()
        for phase in SyncPhase:
            await client.run_sync_phase(phase, make_offer())
        clock.now_s += 1000
        async with asyncio.timeout(60):
            while not service.lease.taken(SECOND):
                await asyncio.sleep(0.01)

    with serving(make_app(service, token="t")) as url:
        asyncio.run(live(Run(url, settings).make(token="t", run=FIRST)))
    # After the server's end, which no call survives.
    clock.now_s += 61
    assert service.lease.taken(SECOND) == "", "it has died without a word"
