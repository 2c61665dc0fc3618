"""``--depth 1 2 3``: options that take several values in a row, for commands without arguments: :class:`ManyValues`."""

from typing import Any

from typer.core import TyperCommand

__all__ = ["ManyValues"]


class ManyValues(TyperCommand):
    """A command whose repeatable options may be given once with several values after them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write the option's name before each of its values, which is what the parser knows."""
        repeatable = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        spelled: list[str] = []
        current = None
        for place, argument in enumerate(args):
            if argument.startswith("-") and not _is_number(argument):
                current = argument if argument in repeatable else None
            elif current is not None and args[place - 1] != current:
                spelled.append(current)
            spelled.append(argument)
        return list(super().parse_args(ctx, spelled))


def _is_number(argument: str) -> bool:
    return argument.removeprefix("-").isdecimal()
