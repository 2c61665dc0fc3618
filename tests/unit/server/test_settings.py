"""The server's settings: one table, three spellings, and no address that others reach without a key."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gapless import EngineConfig
from gapless.cli.main import app
from gapless.cli.settings_sources import Setting, resolve_settings, settings_table
from gapless.errors import ConfigError
from gapless.server.settings import ServerSettings, is_loopback

TABLE = settings_table()
DOCUMENT = Path(__file__).parents[3] / "docs" / "server" / "settings.md"
SAMPLES: Mapping[str, Any] = {"text": "x", "whole number": 7, "number": 2.5, "texts": ("a", "b")}
SPECIAL: Mapping[str, Any] = {
    "model": "smollm2",
    "host": "localhost",
    "chat_template": "{{ messages }}",
    "generation_config": "none",
    "log_level": "debug",
    "device": "cpu",
    "dtype": "float32",
    "load_format": "dummy",
    "block_size": 32,
    "gpu_memory_utilization": 0.5,
    "max_body_bytes": 4096,
    "max_held_body_bytes": 16 << 20,
    "override_generation_config": {"top_k": 3},
}


def sample(setting: Setting) -> Any:
    if setting.kind == "yes or no":
        return not setting.default
    return SPECIAL[setting.key] if setting.key in SPECIAL else SAMPLES[setting.kind]


def as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {as_toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def value_of(settings: ServerSettings, setting: Setting) -> Any:
    return getattr(settings.engine if setting.is_engine else settings, setting.field)


@pytest.mark.parametrize("setting", TABLE, ids=lambda setting: setting.key)
def test_each_setting_can_come_from_each_source(setting: Setting, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("secret-key\n")  # what api_key_file names
    value = sample(setting)
    base = {} if setting.key == "model" else {"model": "smollm2"}
    file = tmp_path / "settings.toml"
    file.write_text(f"{setting.key} = {as_toml(value)}\n")
    sources = {
        "flag": resolve_settings({**base, setting.key: value}, {}),
        "variable": resolve_settings(base, {setting.variable: as_text(value)}),
        "file": resolve_settings(base, {}, str(file)),
        "file named by a variable": resolve_settings(base, {"GAPLESS_CONFIG": str(file)}),
    }
    found = {source: value_of(settings, setting) for source, settings in sources.items()}
    assert found == dict.fromkeys(sources, value)
    assert value != setting.default, "a sample that is the default shows nothing"


def as_arguments(setting: Setting, value: Any) -> list[str]:
    """How one writes a value on a command line."""
    match value:
        case bool():
            return [setting.flag if value else f"--no-{setting.flag[2:]}"]
        case tuple():
            return [argument for item in value for argument in (setting.flag, item)]
        case dict():
            return [setting.flag, json.dumps(value)]
        case _:
            return [setting.flag, str(value)] if setting.flag else [str(value)]


def settings_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> ServerSettings:
    """What ``gapless serve`` makes of a command line: the settings with which it would listen."""
    made = []

    def listen(settings: ServerSettings) -> None:
        made.append(settings)
        raise typer.Exit(3)

    monkeypatch.setattr("gapless.cli.serve.open_listener", listen)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 3, result.output
    return made[0]


@pytest.mark.parametrize("setting", TABLE, ids=lambda setting: setting.key)
def test_each_setting_can_be_written_on_a_command_line(setting: Setting, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("secret-key\n")
    for name in [name for name in os.environ if name.startswith("GAPLESS_")]:
        monkeypatch.delenv(name)
    values = [not setting.default, setting.default] if setting.kind == "yes or no" else [sample(setting)]
    for value in values:
        model = [] if setting.key == "model" else ["smollm2"]
        written = settings_of([*model, *as_arguments(setting, value)], monkeypatch)
        assert value_of(written, setting) == value
        base = {} if setting.key == "model" else {"model": "smollm2"}
        assert written == resolve_settings({**base, setting.key: value}, {}), "and nothing else has changed"


def test_all_flags_together_are_all_settings_together(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("secret-key\n")
    table = [setting for setting in TABLE if setting.key != "num_blocks"]  # another way to say kv_cache_memory_bytes
    values = {setting.key: sample(setting) for setting in table}
    arguments = [argument for setting in table for argument in as_arguments(setting, values[setting.key])]
    assert settings_of(arguments, monkeypatch) == resolve_settings(values, {})


@pytest.mark.parametrize(("low", "high"), [("file", "variable"), ("variable", "flag"), ("file", "flag")])
def test_flag_before_variable_before_file_before_default(low: str, high: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('model = "m"\n' + ("port = 1\nmax_rows = 1\n" if low == "file" else ""))
    number = {low: 1, high: 2}
    environment = {
        name: str(number["variable"]) for name in ("GAPLESS_PORT", "GAPLESS_MAX_ROWS") if "variable" in number
    }
    flags = {"port": number["flag"], "max_rows": number["flag"]} if "flag" in number else {}
    settings = resolve_settings(flags, environment, str(file))
    assert (settings.port, settings.engine.max_rows) == (2, 2)
    assert (settings.host, settings.engine.depth) == ("127.0.0.1", EngineConfig().depth)


@pytest.mark.parametrize(
    ("environment", "content", "message"),
    [
        ({"GAPLESS_PROT": "1"}, "", "the environment has GAPLESS_PROT, which is no setting of gapless serve"),
        ({"GAPLESS_PORT": "http"}, "", "GAPLESS_PORT='http' must be a whole number"),
        ({"GAPLESS_INSECURE": "maybe"}, "", "GAPLESS_INSECURE='maybe' must be true or false"),
        ({"GAPLESS_REQUEST_TIMEOUT": "soon"}, "", "GAPLESS_REQUEST_TIMEOUT='soon' must be a number"),
        ({"GAPLESS_OVERRIDE_GENERATION_CONFIG": "[1]"}, "", "must be a JSON object"),
        ({"GAPLESS_HOST": "0.0.0.0"}, "", "host='0.0.0.0' can be reached by others and there is no API key"),
        ({"GAPLESS_HOST": ""}, "", "host='' can be reached by others"),
        ({"GAPLESS_API_KEY_FILE": "/no/such"}, "", "api_key_file='/no/such' cannot be read: No such file"),
        ({"GAPLESS_API_KEYS": "schlüssel"}, "", "API key 1 of 1 must be printable ASCII"),
        ({"GAPLESS_API_KEYS": ""}, "", "GAPLESS_API_KEYS is set and has no key"),
        ({"GAPLESS_API_KEYS": " ,\n"}, "", "GAPLESS_API_KEYS is set and has no key"),
        ({}, "prot = 1", "has 'prot', which is no setting of gapless serve"),
        ({}, 'api_keys = ["k"]', "has api_keys: keys stand in a file of their own"),
        ({}, "port = true", "is True; it must be a whole number"),
        ({}, 'port = "80"', "is '80'; it must be a whole number"),
        ({}, "insecure = 1", "is 1; it must be true or false"),
        ({}, "cors_origin = [1]", "is [1]; it must be texts"),
        ({}, "port = 70000", "port=70000 must be a whole number from 0 to 65535"),
        ({}, "request_timeout = 0", "request_timeout=0.0 must be above 0"),
        ({}, "request_timeout = nan", "request_timeout=nan must be above 0"),
        ({}, 'log_level = "loud"', "log_level='loud' is unknown; use one of debug, info, warning, error"),
        ({}, "depth = 0", "depth=0 must be an integer of at least 1"),
        ({}, "port = ", "cannot be read: Invalid value"),
    ],
)
def test_a_wrong_setting_is_named(environment: dict[str, str], content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        resolve_settings({"model": "m"}, environment, str(file))
    assert message in str(caught.value)
    assert "schlüssel" not in str(caught.value), "a key is never shown"


def test_keys_come_from_file_and_environment_and_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\nfirst-key\n\n  second-key  \n")
    environment = {"GAPLESS_API_KEYS": "third-key, fourth-key\nfifth-key"}
    settings = resolve_settings({"model": "m", "api_key_file": str(file), "host": "0.0.0.0"}, environment)
    assert sorted(settings.api_keys) == ["fifth-key", "first-key", "fourth-key", "second-key", "third-key"]
    assert "key" not in repr(settings).replace("api_key_file", "").replace(str(file), "")
    flags = {option for setting in TABLE for option in [setting.flag] if "key" in option}
    assert flags == {"--api-key-file"}, "keys on a command line can be seen by every user of the machine"
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        resolve_settings({"model": "m", "api_key_file": str(file)}, {})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_other_addresses_than_loopback_need_a_key(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    if expected:
        assert "*" not in ServerSettings(host=host).accepted_hosts
    else:
        with pytest.raises(ConfigError, match="no API key"):
            ServerSettings(host=host)
    assert ServerSettings(host=host, insecure=True).host == host
    assert ServerSettings(host=host, api_keys=("k",)).accepted_hosts == {"*"}
    assert ServerSettings(host=host, api_keys=("k",), allowed_hosts=("API.example.org",)).accepted_hosts == {
        "api.example.org"
    }


def test_help_has_every_setting_under_its_group() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    groups = list(dict.fromkeys(setting.group for setting in TABLE))
    assert [group for group in groups if f"{group} options:" not in shown] == []
    places = {group: shown.index(f"{group} options:") for group in groups}
    for setting in TABLE:
        place = shown.index(setting.flag or "MODEL", places[setting.group])
        later = [start for start in places.values() if start > places[setting.group]]
        assert place < min(later, default=len(shown)), setting.key
    assert "Exit codes: 0" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: no model: give one as in 'gapless serve smollm2'"),
        (["m", "--host", "0.0.0.0"], "error: host='0.0.0.0' can be reached by others and there is no API key"),
        (["m", "--depth", "0"], "error: depth=0 must be an integer of at least 1"),
        (["m", "--override-generation-config", "x"], "error: --override-generation-config must be a JSON object"),
        (["m", "--config", "/no/such.toml"], "error: the configuration file /no/such.toml cannot be read"),
    ],
)
def test_wrong_use_is_told_in_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert result.stderr.strip().splitlines()[-1].startswith(message)


def test_the_documented_settings_are_those_there_are() -> None:
    page = DOCUMENT.read_text("utf-8")
    rows = re.findall(r"^\| (?:`(--\S+)`|MODEL) \| `(\w+)` \| `(GAPLESS_\w+)` \|", page, re.MULTILINE)
    assert rows == [(setting.flag, setting.key, setting.variable) for setting in TABLE]


def test_the_tables_of_the_documentation_are_current() -> None:
    made = run_path(str(DOCUMENT.parent / "make_tables.py"))["pages"]()
    assert len(made) == 2
    for path, text in made.items():
        assert path.read_text("utf-8") == text, "run docs/server/make_tables.py"
