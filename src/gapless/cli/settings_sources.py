"""Where the server's settings come from: one table, :func:`settings_table`, and :func:`resolve_settings`.

A setting is a flag (``--max-body-bytes``), a key of the configuration file (``max_body_bytes``) and a variable
(``GAPLESS_MAX_BODY_BYTES``); the first of flag, variable, file and default that there is wins. The table is made from
:class:`~gapless.server.settings.ServerSettings` and :class:`~gapless.EngineConfig`, and flags, ``--help`` and
documentation are made from the table. Whatever names no setting is an error, since a typing mistake in a limit or a key
must not go unseen.
"""

import json
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args, get_origin, get_type_hints

from gapless.cli.options import ENGINE_HELP, MODEL_HELP, flag_of, read_chat_template
from gapless.config import ONLINE_TOKEN_BUDGET, EngineConfig
from gapless.errors import ConfigError, shown
from gapless.server.settings import ServerSettings

__all__ = [
    "Setting",
    "SettingKind",
    "environment_settings",
    "json_object",
    "read_keys",
    "resolve_settings",
    "settings_table",
    "shown_default",
]

SettingKind: TypeAlias = Literal["text", "whole number", "number", "yes or no", "texts", "object"]

PREFIX: Final = "GAPLESS_"
KEYS_VARIABLE: Final = "GAPLESS_API_KEYS"
CONFIG_VARIABLE: Final = "GAPLESS_CONFIG"
# An engine that serves records its timeline, which /metrics shows.
_ENGINE_DEFAULTS: Final[Mapping[str, Any]] = {"timeline": True, "token_budget": ONLINE_TOKEN_BUDGET}
_YES_NO: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A line of the table.

    Attributes:
        key: in the configuration file; the variable is ``GAPLESS_`` and the key in upper case.
        field: of ``ServerSettings`` or, for the engine's, of ``EngineConfig``.
        flag: on the command line; empty for the model, which needs none.
        group: heading of ``--help``.
        kind: what values it takes.
        default: ``None`` where there is none.
    """

    key: str
    field: str
    flag: str
    group: str
    help: str
    kind: SettingKind
    default: Any
    is_engine: bool

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.key.upper()


def settings_table() -> tuple[Setting, ...]:
    """Every setting, by group."""
    hints = get_type_hints(ServerSettings)
    model = Setting(
        key="model", field="model", flag="", group="Model", help=MODEL_HELP, kind="text", default=None, is_engine=False
    )
    table = [model]
    for field in fields(ServerSettings):
        if "group" not in field.metadata:
            continue
        flag = field.metadata["flag"] or "--" + field.name.removesuffix("_s").replace("_", "-")
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        table.append(
            Setting(
                key=_key(flag),
                field=field.name,
                flag=flag,
                group=field.metadata["group"],
                help=field.metadata["help"],
                kind=_kind(hints[field.name]),
                default=default,
                is_engine=False,
            )
        )
    hints = get_type_hints(EngineConfig)
    for engine_field in fields(EngineConfig):
        if engine_field.name in ENGINE_HELP:
            flag = flag_of("engine", engine_field.name)
            table.append(
                Setting(
                    key=_key(flag),
                    field=engine_field.name,
                    flag=flag,
                    group="Engine",
                    help=ENGINE_HELP[engine_field.name],
                    kind=_kind(hints[engine_field.name]),
                    default=_ENGINE_DEFAULTS.get(engine_field.name, engine_field.default),
                    is_engine=True,
                )
            )
    return tuple(table)


def resolve_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], config_file: str | None = None
) -> ServerSettings:
    """Put the settings together and check them.

    Args:
        flags: values by key, of the flags that were given.
        environment: such as ``os.environ``; only what begins with ``GAPLESS_`` counts.
        config_file: TOML; instead of it, ``GAPLESS_CONFIG`` may name one.

    Raises:
        ConfigError: an unknown name, or a value that is impossible, with where it stands.
    """
    table = {setting.key: setting for setting in settings_table()}
    config_file = config_file or environment.get(CONFIG_VARIABLE)
    from_file = {} if config_file is None else _file_settings(Path(config_file), table)
    values = {**from_file, **environment_settings(environment, table), **flags}
    if "model" not in values:
        raise ConfigError("no model: give one as in 'gapless serve smollm2', as GAPLESS_MODEL, or in --config FILE")
    engine = {table[key].field: value for key, value in values.items() if table[key].is_engine}
    server = {table[key].field: value for key, value in values.items() if not table[key].is_engine}
    server["chat_template"] = read_chat_template(server.get("chat_template"))
    api_keys = _keys_of_environment(environment)
    if server.get("api_key_file") is not None:
        api_keys += read_keys(Path(server["api_key_file"]))
    return ServerSettings(engine=EngineConfig(**{**_ENGINE_DEFAULTS, **engine}), api_keys=api_keys, **server)


def environment_settings(environment: Mapping[str, str], table: Mapping[str, Setting]) -> dict[str, Any]:
    """Values by key, out of variables.

    Raises:
        ConfigError: a variable that begins with ``GAPLESS_`` names no setting, or its value is impossible.
    """
    by_variable = {setting.variable: setting for setting in table.values()}
    values = {}
    for name, text in environment.items():
        if not name.startswith(PREFIX) or name in (KEYS_VARIABLE, CONFIG_VARIABLE):
            continue
        if name not in by_variable:
            raise ConfigError(f"the environment has {name}, which is no setting of gapless serve; see its --help")
        setting = by_variable[name]
        values[setting.key] = _from_text(setting, text, name)
    return values


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file: one a line; empty lines and what begins with ``#`` are none.

    Raises:
        ConfigError: it cannot be read, or has no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"api_key_file={shown(str(path))} cannot be read: {_why(error)}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise ConfigError(f"api_key_file={shown(str(path))} has no key; write one a line, or leave the setting out")
    return keys


def _keys_of_environment(environment: Mapping[str, str]) -> tuple[str, ...]:
    text = environment.get(KEYS_VARIABLE)
    keys = tuple((text or "").replace(",", " ").split())
    if text is not None and not keys:
        # Somebody meant the server to have keys: a secret that is missing must not open it.
        raise ConfigError(f"{KEYS_VARIABLE} is set and has no key; unset it to serve without keys")
    return keys


def _file_settings(path: Path, table: Mapping[str, Setting]) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {_why(error)}") from error
    values = {}
    for key, value in content.items():
        if key == "api_keys":
            raise ConfigError(f"{path} has api_keys: keys stand in a file of their own (api_key_file = ...)")
        if key not in table:
            raise ConfigError(f"{path} has {shown(key)}, which is no setting of gapless serve; see its --help")
        values[key] = _from_toml(table[key], value, f"{key} in {path}")
    return values


def _from_text(setting: Setting, text: str, place: str) -> Any:
    """A value out of a variable."""
    try:
        match setting.kind:
            case "whole number":
                return int(text)
            case "number":
                return float(text)
            case "yes or no":
                return _YES_NO[text.lower()]
            case "texts":
                return tuple(part.strip() for part in text.split(",") if part.strip())
            case "object":
                return json_object(text)
            case "text":
                return text
    except (ValueError, KeyError):
        raise ConfigError(f"{place}={shown(text)} must be {_WANTED[setting.kind]}") from None


def _from_toml(setting: Setting, value: Any, place: str) -> Any:
    """A value out of the file."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match setting.kind, value:
        case "text", str():
            return value
        case "yes or no", bool():
            return value
        case "whole number", int() if is_number:
            return value
        case "number", int() | float() if is_number:
            return float(value)
        case "texts", str():
            return (value,)
        case "texts", list() if all(isinstance(item, str) for item in value):
            return tuple(value)
        case "object", dict():
            return value
    raise ConfigError(f"{place} is {shown(value)}; it must be {_WANTED[setting.kind]}")


_WANTED: Final[Mapping[SettingKind, str]] = {
    "text": "a text",
    "whole number": "a whole number",
    "number": "a number",
    "yes or no": "true or false",
    "texts": "texts: a list in a file, separated by commas in a variable",
    "object": "a JSON object, or a table in a file",
}


def shown_default(setting: Setting) -> str:
    """A setting's default as a user would write it; empty where there is none."""
    if setting.default in (None, (), {}):
        return ""
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: it is none.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _key(flag: str) -> str:
    return flag[2:].replace("-", "_")


def _kind(hint: Any) -> SettingKind:
    if get_origin(hint) in (types.UnionType,):
        [hint] = [member for member in get_args(hint) if member is not type(None)]
    if get_origin(hint) is Literal:
        return "text"
    if get_origin(hint) in (tuple, Sequence):
        return "texts"
    if get_origin(hint) is Mapping:
        return "object"
    kinds: dict[Any, SettingKind] = {int: "whole number", float: "number", bool: "yes or no", str: "text"}
    return kinds[hint]


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
