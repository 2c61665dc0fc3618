"""``gapless serve``: a model behind HTTP, with settings from flags, environment and a file.

The options are made from the table of :mod:`gapless.cli.settings_sources`; everything else is
:mod:`gapless.server.serve`, which is imported only now, since it needs packages that the other commands do without.
"""

import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from gapless.cli.console import UsageError, reported
from gapless.cli.settings_sources import Setting, json_object, resolve_settings, settings_table, shown_default
from gapless.errors import ConfigError
from gapless.server.listening import open_listener
from gapless.server.settings import ServerSettings

__all__ = ["GroupedCommand", "serve"]

_TYPES: dict[str, Any] = {
    "text": str | None,
    "whole number": int | None,
    "number": float | None,
    "yes or no": bool | None,
    "texts": list[str] | None,
    "object": str | None,
}


class GroupedCommand(TyperCommand):
    """A command whose help shows each group of options under a heading of its own."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write all options, in the order of their groups."""
        groups: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or "General", []).append(record)
        for name, records in groups.items():
            with formatter.section(f"{name} options"):
                formatter.write_dl(records)


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a command's parameter ``flags`` into an option for each setting."""
    table = settings_table()

    def run(**given: Any) -> None:
        flags = {setting.key: given.pop(setting.key) for setting in table}
        command(flags={key: value for key, value in flags.items() if value not in (None, [])}, **given)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
    parameters = [*map(_parameter, table), *own]
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return run


def _parameter(setting: Setting) -> inspect.Parameter:
    if not setting.flag:
        made: Any = typer.Argument(
            metavar="MODEL", help=setting.help, rich_help_panel=setting.group, show_default=False
        )
    else:
        flag = f"{setting.flag}/--no-{setting.flag[2:]}" if setting.kind == "yes or no" else setting.flag
        made = typer.Option(
            flag,
            help=setting.help + _shown_default(setting),
            rich_help_panel=setting.group,
            show_default=False,
        )
    kind: Any = _TYPES[setting.kind]
    annotation = Annotated[kind, made]
    return inspect.Parameter(setting.key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown_default(setting: Setting) -> str:
    text = shown_default(setting)
    return f" [default: {text}]" if text else ""


@_with_settings
def serve(
    *,
    flags: dict[str, Any],
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="A TOML file with settings by the names of these options.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the traceback of a failure to start.")] = False,
) -> None:
    """Serve a model over HTTP, with an API like OpenAI's.

    Each option is a key of --config FILE too (max_body_bytes = 1000000) and an environment variable
    (GAPLESS_MAX_BODY_BYTES=1000000). An option given here comes before the variable, the variable before the file.

    Exit codes: 0 after SIGTERM or Ctrl-C, when running requests had their time; 1 if it could not start; 2 wrong use;
    70 if the engine died; 130 or 143 if a second Ctrl-C or SIGTERM, or one while loading, ended it at once.
    """
    with reported(verbose=verbose):
        settings = _settings(flags, config)
        # The address first: one in use is told at once, before anything takes time.
        with open_listener(settings) as listener:
            try:
                from gapless.server.serve import run_server
            except ModuleNotFoundError as error:
                if error.name is None or error.name.partition(".")[0] == "gapless":
                    raise
                raise UsageError(
                    f"gapless serve needs the package {error.name}: pip install 'gapless[server]'"
                ) from error
            exit_code = run_server(settings, listener)
    raise typer.Exit(exit_code)


def _settings(flags: dict[str, Any], config: str | None) -> ServerSettings:
    """The settings; a wrong one is wrong use."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in flags.items()}
    if "override_generation_config" in values:
        try:
            values["override_generation_config"] = json_object(str(values["override_generation_config"]))
        except ValueError:
            raise UsageError("--override-generation-config must be a JSON object") from None
    try:
        return resolve_settings(values, os.environ, config)
    except ConfigError as error:
        raise UsageError(str(error)) from error
