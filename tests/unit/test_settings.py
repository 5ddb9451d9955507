"""Settings: priorities, refusals and the reference page."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.shared.errors import ConfigurationError
from penstock.shared.redis.address import redact_url
from penstock.shared.settings import (
    Settings,
    environment_name,
    load_settings,
    setting_names,
)
from penstock.shared.settings.profiles import PROFILES
from penstock.shared.settings.reference import render_reference

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _empty_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "penstock.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def test_defaults_are_the_trees() -> None:
    assert load_settings(environment={}) == Settings()


def test_flags_win_over_environment_over_file_over_default() -> None:
    write("[engine]\nmax_sequences = 2\nblock_size = 8\nthreads = 1\n")
    environment = {"PENSTOCK_ENGINE__MAX_SEQUENCES": "3", "PENSTOCK_ENGINE__BLOCK_SIZE": "32"}
    settings = load_settings({"engine.max_sequences": 4}, environment=environment)
    assert settings.engine.max_sequences == 4
    assert settings.engine.block_size == 32
    assert settings.engine.threads == 1
    assert settings.engine.prefix_cache is True


def test_a_flag_that_is_none_was_not_given() -> None:
    environment = {"PENSTOCK_ENGINE__MAX_SEQUENCES": "3"}
    settings = load_settings({"engine.max_sequences": None}, environment=environment)
    assert settings.engine.max_sequences == 3


def test_file_by_argument_wins_over_variable_over_current_directory() -> None:
    write("[queue]\nshard = 1\n")
    write("[queue]\nshard = 2\n", "by-variable.toml")
    write("[queue]\nshard = 3\n", "by-argument.toml")
    variable = {"PENSTOCK_CONFIG": "by-variable.toml"}
    assert load_settings(environment={}).queue.shard == 1
    assert load_settings(environment=variable).queue.shard == 2
    assert load_settings(config="by-argument.toml", environment=variable).queue.shard == 3


def test_redis_url_stands_between_our_variable_and_the_file() -> None:
    write('[redis]\nurl = "redis://from-file"\n')
    environment = {"REDIS_URL": "redis://from-redis-url"}
    assert load_settings(environment=environment).redis.url == "redis://from-redis-url"
    environment["PENSTOCK_REDIS__URL"] = "redis://from-ours"
    assert load_settings(environment=environment).redis.url == "redis://from-ours"


def test_an_empty_variable_is_not_set() -> None:
    environment = {"REDIS_URL": "", "PENSTOCK_WORKER__LEASE_MS": ""}
    assert load_settings(environment=environment) == Settings()


def test_words_for_none_and_sizes() -> None:
    write('[worker]\nmetrics_port = "off"\n[engine]\nkv_memory = "512MiB"\n')
    settings = load_settings(environment={"PENSTOCK_MODEL__MAX_MODEL_LEN": "auto"})
    assert settings.worker.metrics_port is None
    assert settings.engine.kv_memory == 512 * 2**20
    assert settings.model.max_model_len is None


def test_every_setting_is_reachable_by_its_variable() -> None:
    free_text = {
        "redis.embedded_dir",
        "redis.password_file",
        "worker.metrics_host",
        "worker.step_log",
        "model.path",
        "model.quantization_keep",
        "speculation.draft_model",
        "gateway.host",
        "gateway.tls_certificate",
        "gateway.tls_key",
        "gateway.tls_key_password_file",
        "gateway.tls_client_ca",
        "gateway.cors_origins",
        "batches.metrics_host",
        "batches.storage",
        "batches.webhook_secrets",
    }
    for name in setting_names():
        environment = {environment_name(name): "not valid %"}
        if name in free_text:
            section, _, key = name.partition(".")
            settings = load_settings(environment=environment)
            assert str(getattr(getattr(settings, section), key)) == "not valid %"
        else:
            with pytest.raises(ConfigurationError, match=environment_name(name)):
                load_settings(environment=environment)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("PENSTOCK_REDIS__URL", "localhost:6379", "must be redis://host:port/db"),
        ("PENSTOCK_REDIS__URL", "redis://host:port", "must be redis://host:port/db"),
        ("PENSTOCK_REDIS__URL", "unix://", "must be redis://host:port/db"),
        ("PENSTOCK_REDIS__URL", "unix://run/redis.sock", "or unix:///path"),
        ("PENSTOCK_REDIS__URL", "redis://host/abc", "db is the database's number"),
        ("PENSTOCK_REDIS__SOCKET_TIMEOUT_S", "0", "greater than 0"),
        ("PENSTOCK_REDIS__SOCKET_TIMEOUT_S", "inf", "less than or equal to 600"),
        ("PENSTOCK_REDIS__EMBEDDED", "yes", "'auto', 'never' or 'always'"),
        ("PENSTOCK_QUEUE__MODEL", "a model", "match pattern"),
        ("PENSTOCK_QUEUE__SHARD", "-1", "greater than or equal to 0"),
        ("PENSTOCK_QUEUE__RETENTION_S", "10m", "valid integer"),
        ("PENSTOCK_QUEUE__MAX_QUEUED_BYTES", "many", "536870912 or 512MiB"),
        ("PENSTOCK_WORKER__METRICS_PORT", "65536", "less than or equal to 65535"),
        ("PENSTOCK_WORKER__LEASE_MS", "1.5", "valid integer"),
        ("PENSTOCK_WORKER__HEARTBEAT_MS", "1000", "at most a third of lease_ms"),
        ("PENSTOCK_WORKER__STREAM_INTERVAL_MS", "1001", "less than or equal to 1000"),
        ("PENSTOCK_ENGINE__PREFIX_CACHE", "perhaps", "valid boolean"),
        ("PENSTOCK_ENGINE__MAX_SEQUENCES", "0", "greater than or equal to 1"),
        ("PENSTOCK_MODEL__DTYPE", "int8", "'auto', 'float32', 'bfloat16' or 'float16'"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(variable: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(environment={variable: value})
    message = str(caught.value)
    assert variable in message
    assert allowed in message
    assert "\n" not in message


def test_a_stream_interval_may_not_look_like_a_hung_engine() -> None:
    given = {"worker.stream_interval_ms": 251, "worker.hang_timeout_s": 1}
    with pytest.raises(ConfigurationError, match="at most a quarter of hang_timeout_s"):
        load_settings(given)
    assert load_settings(given | {"worker.stream_interval_ms": 250})


def test_a_wrong_value_in_the_file_names_file_and_setting() -> None:
    write("[engine]\nmax_sequences = 'many'\n[queue]\nshard = -1\n")
    with pytest.raises(ConfigurationError) as caught:
        load_settings(environment={})
    assert "engine.max_sequences = 'many' (from penstock.toml)" in str(caught.value)
    assert "queue.shard = -1 (from penstock.toml)" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[engine]\nmax_sequence = 1\n", "did you mean engine.max_sequences?"),
        ("[engin]\nblock_size = 1\n", "did you mean engine.block_size?"),
        ("[nonsense]\nx = 1\n", "docs/settings.md lists them all"),
        ("max_sequences = 1\n", r"one of \[redis\], \[queue\]"),
        ("[engine\n", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused(text: str, hint: str) -> None:
    write(text)
    with pytest.raises(ConfigurationError, match=hint):
        load_settings(environment={})


def test_a_file_that_is_not_there_or_not_text_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml: No such file"):
        load_settings(config="nowhere.toml", environment={})
    Path("latin.toml").write_bytes(b"[redis]\nurl = '\xe9'\n")
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        load_settings(config="latin.toml", environment={})


def test_an_unknown_variable_is_refused_with_the_closest_name() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean PENSTOCK_REDIS__URL\?"):
        load_settings(environment={"PENSTOCK_REDIS_URL": "redis://host"})
    with pytest.raises(ConfigurationError, match=r"did you mean PENSTOCK_WORKER__METRICS_PORT\?"):
        load_settings(environment={"PENSTOCK_WORKER_METRICS_PORT": "1"})


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean redis\.url\?"):
        load_settings({"redis.ur": "redis://host"}, environment={})


def test_variables_of_a_kubernetes_service_called_penstock_are_left_alone() -> None:
    environment = {
        "PENSTOCK_WORKER_SERVICE_HOST": "10.0.0.1",
        "PENSTOCK_WORKER_SERVICE_PORT": "9464",
        "PENSTOCK_WORKER_SERVICE_PORT_METRICS": "9464",
        "PENSTOCK_WORKER_PORT": "tcp://10.0.0.1:9464",
        "PENSTOCK_WORKER_PORT_9464_TCP": "tcp://10.0.0.1:9464",
        "PENSTOCK_WORKER_PORT_9464_TCP_ADDR": "10.0.0.1",
    }
    assert load_settings(environment=environment) == Settings()


def test_heartbeat_follows_the_lease() -> None:
    settings = load_settings(environment={"PENSTOCK_WORKER__LEASE_MS": "600"})
    assert settings.worker.heartbeat_interval_ms == 150
    with pytest.raises(ConfigurationError, match=r"PENSTOCK_WORKER__HEARTBEAT_MS.*third"):
        load_settings(
            environment={
                "PENSTOCK_WORKER__LEASE_MS": "600",
                "PENSTOCK_WORKER__HEARTBEAT_MS": "201",
            }
        )


def test_a_password_is_shown_nowhere() -> None:
    url = "redis://user:hunter2@host:1/0?password=hunter2"
    settings = load_settings({"redis.url": url}, environment={})
    assert settings.redis.url == url
    assert "hunter2" not in repr(settings)
    assert redact_url(url) == "redis://***@host:1/0"
    for wrong in ("http://user:hunter2@host", "redis://user:hunter2", "redis://:a/hunter2@host:x"):
        with pytest.raises(ConfigurationError) as caught:
            load_settings({"redis.url": wrong}, environment={})
        assert "hunter2" not in str(caught.value)


def test_a_password_file_takes_the_place_of_a_password(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a/b@c\n")
    flags = {"redis.url": "rediss://bot:old@h:7/2", "redis.password_file": secret}
    assert load_settings(flags).redis.url == "rediss://bot:a%2Fb%40c@h:7/2"
    assert load_settings({"redis.password_file": secret}).redis.url is None
    with pytest.raises(ConfigurationError, match=r"password_file .*none cannot be read"):
        load_settings(flags | {"redis.password_file": tmp_path / "none"})
    with pytest.raises(ConfigurationError, match=r"password_file \\ud800 cannot be read"):
        load_settings(flags | {"redis.password_file": "\ud800"})


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().engine.max_sequences = 1  # type: ignore[misc]


def test_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == render_reference(), "run: python -m penstock.shared.settings > docs/settings.md"


def test_reference_states_default_and_effect_of_every_setting() -> None:
    page = render_reference()
    for name in setting_names():
        assert f"`{environment_name(name)}`: default `" in page
    for section in Settings.model_fields.values():
        for field in section.default.__class__.model_fields.values():
            assert field.description
            assert field.description in page


def test_a_profile_is_overruled_by_whatever_is_given() -> None:
    found = load_settings({"worker.profile": "latency"}, environment={})
    assert (found.engine.chunking, found.engine.max_sequences) == ("adaptive", 8)
    environment = {"PENSTOCK_WORKER__PROFILE": "latency", "PENSTOCK_ENGINE__MAX_SEQUENCES": "5"}
    found = load_settings({"engine.chunking": "fixed"}, environment=environment)
    assert (found.engine.chunking, found.engine.max_sequences) == ("fixed", 5)
    assert found.engine.target_itl_ms == 25.0


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_is_a_value_of_the_setting_and_valid(name: str) -> None:
    found = load_settings({"worker.profile": name}, environment={})
    assert found.worker.profile == name
    unset = load_settings({}, environment={})
    assert (found == unset) == (name == "balanced")


def test_what_is_no_profile_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"worker.profile = 'fast'.*'throughput'"):
        load_settings({"worker.profile": "fast"}, environment={})
