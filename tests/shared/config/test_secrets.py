"""Secrets of a configuration: recognised by their keys, and written nowhere."""

from __future__ import annotations

import pickle

import pytest
from config_support import configuration

from shared.config import RunConfig
from shared.config.base import Section
from shared.config.explain import sections_in
from shared.config.secrets import MASK, hide, is_secret, masked, masked_keys, redacted
from shared.errors import ConfigError

SECRETS = (
    "api_key OPENAI_API_KEY apiKey X-Api-Key key token HF_TOKEN access_token api_keys password"
    " db_password passwd client_secret credentials Authorization AWS_SECRET_ACCESS_KEY private_key"
    " auth bearer pwd MYSQL_PWD PGPASSWORD authtoken accesskey secretkey private_key_pem hf_tokens"
)
NONE = (
    "tokenizer token_env max_tokens num_tokens stop_tokens coord_tokens answer_key key_column keys"
    " tokens max_new_tokens key_value_store keyboard monkey token_ids secretary api_key_env"
)


@pytest.mark.parametrize("key", SECRETS.split())
def test_keys_of_secrets_are_known(key):
    assert is_secret(key)


@pytest.mark.parametrize("key", NONE.split())
def test_keys_of_data_and_of_names_are_none(key):
    assert not is_secret(key)


def names(section: type[Section]) -> set[str]:
    inner = [
        one for field in section.model_fields.values() for one in sections_in(field.annotation)
    ]
    return {*section.model_fields, *(name for one in inner for name in names(one))}


def test_no_key_of_the_schema_is_taken_for_a_secret():
    assert [name for name in sorted(names(RunConfig)) if is_secret(name)] == []


def test_what_is_under_a_secret_key_or_in_a_url_is_masked_and_the_rest_stays():
    args = {
        "mode": "ok",
        "api_key": "",
        "token": None,
        "credentials": {"user": "me", "pin": 1234},
        "headers": {"Authorization": "Bearer x", "Accept": "json"},
        "urls": ["https://me:pw@host/a", "http://host/?n=3&api_key=x#top", "http://host/?n=3"],
        "mail": "me@host, see http://host",
        "token_ids": [1, 2],
    }
    expected = {
        **args,
        "credentials": {"user": MASK, "pin": MASK},
        "headers": {"Authorization": MASK, "Accept": "json"},
        "urls": [f"https://{MASK}@host/a", f"http://host/?n=3&api_key={MASK}#top", args["urls"][2]],
    }
    assert masked(args) == expected
    assert masked(expected) == expected
    assert masked_keys(masked(args)) == [
        *("credentials.user", "credentials.pin", "headers.Authorization", "urls"),
    ]


@pytest.fixture
def with_key(tmp_path):
    """Make the configuration of a run whose environment has this key."""

    def make(key):
        environment = {"id": "arithmetic", "args": {"api_key": key, "n": 3}}
        config = configuration(tmp_path / "model", tmp_path / "data", tmp_path / "run")
        section = {"environment": environment | {"rollouts_per_example": 2}}
        return RunConfig.model_validate(config.model_dump() | section)

    return make


def test_files_get_a_configuration_without_secrets_and_processes_get_it_whole(with_key):
    config = with_key("sk-LEAK5")
    assert "LEAK" not in config.model_dump_json()
    assert config.model_dump(mode="json")["environment"]["args"] == {"api_key": MASK, "n": 3}
    assert pickle.loads(pickle.dumps(config)).environment.args["api_key"] == "sk-LEAK5"
    assert config.model_dump()["environment"]["args"]["api_key"] == "sk-LEAK5"
    assert config.model_dump_json() == with_key("another").model_dump_json()


def test_texts_lose_the_secrets_of_variables_and_arguments_and_urls(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-LEAK1")
    monkeypatch.setenv("SHORT_TOKEN", "on")
    monkeypatch.setenv("PWD", "failed")
    hide({"api_key": "sk-LEAK5", "mode": "another", "password": "secret"})
    text = "sk-LEAK1 or sk-LEAK5 on another http://u:pw@host failed"
    assert redacted(text) == f"{MASK} or {MASK} on another http://{MASK}@host failed"


def test_a_refused_address_is_not_repeated_with_its_key(tmp_path):
    servers = [{"base_url": "http://host/?api_key=LEAK", "group_port": 0}]
    with pytest.raises(ConfigError) as caught:
        configuration(
            *(tmp_path / "model", tmp_path / "data", tmp_path / "run"),
            rollout_matching__vllm__server={"servers": servers},
        )
    assert "without query" in str(caught.value) and "LEAK" not in str(caught.value)
