"""The server's settings: :class:`ServerSettings`, checked once and frozen from then on.

Each field carries its help text and the group it belongs to, so that flags, configuration file, environment and
documentation are made from one table (:mod:`gapless.cli.settings_sources`). Immutable: any thread may read it.
"""

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gapless.config import EngineConfig
from gapless.errors import ConfigError, shown
from gapless.generation_defaults import GenerationConfigMode

__all__ = ["LOOPBACK_NAMES", "LogLevel", "ServerSettings", "is_loopback"]

LogLevel = Literal["debug", "info", "warning", "error"]
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_MIB = 1 << 20


def _setting(
    default: object, group: str, help_text: str, *, flag: str | None = None, factory: Callable[[], Any] | None = None
) -> Any:
    """A field with its line of the settings table.

    Args:
        default: of the field.
        group: its heading.
        help_text: one sentence.
        flag: where it is not the field's name.
        factory: makes the default, where that is mutable.
    """
    metadata = {"group": group, "help": help_text, "flag": flag}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """How a model is served over HTTP; what each field does is said beside it.

    Attributes:
        model: a folder, a ``*.gguf`` file, ``smollm2``, a hub name, or a preset with ``load_format="dummy"``.
        engine: the engine's options.
        api_keys: the keys themselves, never shown; out of ``api_key_file`` or ``GAPLESS_API_KEYS``.

    Raises:
        ConfigError: naming setting, value and limit; also for an address that others reach and no key protects.
    """

    model: str = "smollm2"
    engine: EngineConfig = field(default_factory=EngineConfig)
    api_keys: tuple[str, ...] = field(default=(), repr=False)

    served_model_names: tuple[str, ...] = _setting(
        (), "Model", "Name of the model in requests; several are aliases.", flag="--served-model-name"
    )
    chat_template: str | None = _setting(
        None, "Model", "Instead of the model's: a file, one of the model's templates by name, or Jinja source."
    )
    generation_config: GenerationConfigMode = _setting(  # noqa: RUF009 - it makes a field
        "auto", "Model", "auto takes sampling defaults from the model's generation_config.json, none does not."
    )
    override_generation_config: Mapping[str, Any] = _setting(
        None, "Model", "Sampling defaults as a JSON object, by the names of generation_config.json.", factory=dict
    )

    host: str = _setting("127.0.0.1", "Network", "Address to listen on; others than loopback need a key.")
    port: int = _setting(8000, "Network", "TCP port; 0 takes a free one.")
    uds: str | None = _setting(None, "Network", "Listen on this Unix socket (mode 0660) instead of a TCP port.")
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        "Network",
        "Host header to accept, * for any. Without keys: loopback names only; with keys: any.",
        flag="--allowed-host",
    )
    cors_origins: tuple[str, ...] = _setting(
        (), "Network", "Origin whose web pages may call the API, * for any.", flag="--cors-origin"
    )

    api_key_file: str | None = _setting(
        None, "Security", "File with the API keys, one a line; # starts a comment. Or GAPLESS_API_KEYS."
    )
    insecure: bool = _setting(False, "Security", "Listen on an address that others reach without any key.")

    max_body_bytes: int = _setting(8 * _MIB, "Limits", "Longest request body, in bytes.")
    max_held_body_bytes: int = _setting(
        512 * _MIB, "Limits", "Most bytes of bodies of all requests being answered; more are refused with 429."
    )
    max_connections: int = _setting(4096, "Limits", "Most open connections.")
    max_concurrent_requests: int = _setting(2048, "Limits", "Most requests at once; more are refused with 429.")
    request_timeout_s: float = _setting(3600.0, "Limits", "Seconds after which a request is aborted.")
    keep_alive_timeout_s: float = _setting(75.0, "Limits", "Seconds that an idle connection stays open.")
    drain_timeout_s: float = _setting(30.0, "Limits", "Seconds that running requests have after SIGTERM.")

    log_level: LogLevel = _setting("info", "Logs", "debug, info, warning or error.")  # noqa: RUF009
    log_json: bool = _setting(False, "Logs", "A JSON object a line instead of text.")
    log_prompts: bool = _setting(False, "Logs", "Write request bodies into the log; off, no prompt reaches it.")
    access_log: bool = _setting(True, "Logs", "A line for each request.")

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_concurrent_requests"):
            _whole(name, getattr(self, name), 1, 1_000_000)
        _whole("port", self.port, 0, 65_535)
        _whole("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        _whole("max_held_body_bytes", self.max_held_body_bytes, self.max_body_bytes, 1 << 40)
        for name in ("request_timeout_s", "keep_alive_timeout_s", "drain_timeout_s"):
            if not 0 <= (value := getattr(self, name)) <= 1e6 or (value == 0 and name != "drain_timeout_s"):
                least = "0" if name == "drain_timeout_s" else "above 0"
                raise ConfigError(f"{name.removesuffix('_s')}={value} must be {least} and at most 1000000 seconds")
        for name, allowed in (("log_level", get_args(LogLevel)), ("generation_config", get_args(GenerationConfigMode))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={shown(getattr(self, name))} is unknown; use one of {', '.join(allowed)}")
        for name in self.served_model_names:
            if not name or len(name) > 256 or not name.isprintable():
                raise ConfigError(f"served_model_name={shown(name)} must be 1 to 256 printable characters")
        for position, key in enumerate(self.api_keys, 1):
            if not key or not all("!" <= character <= "~" for character in key):
                raise ConfigError(
                    f"API key {position} of {len(self.api_keys)} must be printable ASCII without spaces: "
                    "an Authorization header carries nothing else"
                )
        if not (self.api_keys or self.insecure or self.uds is not None or is_loopback(self.host)):
            raise ConfigError(
                f"host={shown(self.host)} can be reached by others and there is no API key: give --api-key-file or "
                "GAPLESS_API_KEYS, or --insecure if something else guards it"
            )

    @property
    def accepted_hosts(self) -> frozenset[str]:
        """Host headers that are accepted, in lower case and without a port; ``*`` stands for every one.

        A web page can make its own name lead to 127.0.0.1 (DNS rebinding) and so talk to a server that only this
        machine reaches. Without a key, the name it uses is what gives it away.
        """
        if self.allowed_hosts:
            return frozenset(name.lower() for name in self.allowed_hosts)
        if self.api_keys or self.uds is not None or not is_loopback(self.host):
            return frozenset({"*"})
        return frozenset({*LOOPBACK_NAMES, self.host.lower()})


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name other than ``localhost`` counts as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name}={shown(value)} must be a whole number from {least} to {most}")
