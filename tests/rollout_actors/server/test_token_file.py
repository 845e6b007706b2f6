"""The token of a server of this machine is found by its user's processes alone."""

from __future__ import annotations

import os
import stat

import pytest
from fake_server import ObedientEngine, Run, make_request, make_settings, serving_engine
from held_port import held_port

from rollout_actors.server.token_file import find_token, remove_token, token_file, write_token
from shared.errors import ConfigError, RolloutError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_token_is_written_for_its_user_alone_and_found_by_the_servers_address():
    file = token_file("127.0.0.1", 8000)
    umask = os.umask(0)
    first = write_token(file)
    os.umask(umask)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (file.parent, file)]
    assert (modes, len(first) > 40) == ([0o700, 0o600], True)
    for url in ("http://127.0.0.1:8000", "http://localhost:8000/v1"):
        assert find_token(url) == first
    for url in ("http://127.0.0.1:8001", "http://[::1]:8000", "http://h:8000", "http://127.0.0.1"):
        assert find_token(url) is None
    second = write_token(file)
    assert find_token("http://127.0.0.1:8000") == second != first
    remove_token(file, first)
    assert find_token("http://127.0.0.1:8000") == second
    remove_token(file, second)
    assert find_token("http://127.0.0.1:8000") is None
    assert list(file.parent.iterdir()) == []


def test_a_folder_that_is_open_is_closed_and_one_that_is_a_link_is_refused(cache, tmp_path):
    file = token_file("127.0.0.1", 8000)
    file.parent.mkdir(parents=True, mode=0o777)
    write_token(file)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    file.parent.rename(tmp_path / "elsewhere")
    file.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"token: .*/servers .*link .*XDG_CACHE_HOME"):
        write_token(file)


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(cache):
    cache.write_text("a file")
    with pytest.raises(ConfigError, match=r"token: .*\(Not a directory\); .*XDG_CACHE_HOME"):
        write_token(token_file("127.0.0.1", 8000))


def test_a_run_finds_the_token_and_finds_the_next_one_when_its_server_was_started_again(tmp_path):
    settings = make_settings(tmp_path / "model")

    def serving(token, port):
        return serving_engine(ObedientEngine(), settings, token=token, port=port)

    with held_port() as port:
        with serving("one", port) as url:
            file = token_file("127.0.0.1", port)
            with pytest.raises(RolloutError, match=r"HTTP 401: .* token file"):
                Run(url, settings).start()
            file.parent.mkdir(parents=True)
            file.write_text("one")
            run = Run(url, settings).start()
        with serving("two", port):
            file.write_text("two")
            assert run.generate(make_request(0))
