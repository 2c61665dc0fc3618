"""Writes the tables of ``settings.md`` and ``metrics.md`` from the code: run it after a change to either.

``PYTHONPATH=src python docs/server/make_tables.py``
"""

import re
from collections.abc import Iterable
from pathlib import Path

from gapless.cli.settings_sources import settings_table, shown_default
from gapless.server.metric_names import METRICS

FOLDER = Path(__file__).parent


def settings_rows() -> Iterable[str]:
    """A table for each group."""
    group = ""
    for setting in settings_table():
        if setting.group != group:
            group = setting.group
            yield f"\n### {group}\n"
            yield "| flag | key | variable | default | |"
            yield "| --- | --- | --- | --- | --- |"
        flag = f"`{setting.flag}`" if setting.flag else "MODEL"
        default = shown_default(setting)
        text = setting.help.replace("|", "\\|")
        yield f"| {flag} | `{setting.key}` | `{setting.variable}` | {f'`{default}`' if default else ''} | {text} |"


def metrics_rows() -> Iterable[str]:
    """One table."""
    yield "| name | kind | labels | |"
    yield "| --- | --- | --- | --- |"
    for info in METRICS:
        labels = ", ".join(f"`{label}`" for label in info.labels)
        yield f"| `gapless_{info.name}` | {info.kind} | {labels} | {info.text} |"


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    made = {}
    for name, rows in (("settings.md", settings_rows()), ("metrics.md", metrics_rows())):
        path = FOLDER / name
        begin, end = "<!-- table: make_tables.py -->", "<!-- end of table -->"
        table = "\n".join(rows).strip("\n")
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        filled = f"{begin}\n\n{table}\n\n{end}"
        made[path] = pattern.sub(lambda _, filled=filled: filled, path.read_text(encoding="utf-8"))
    return made


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
