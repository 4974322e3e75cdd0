"""`--name=value` arguments taken apart; what is wrong with one is told with what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from ringflash.exits import ConfigFault


def gather(
    arguments: Sequence[str], value: Callable[[str], dict[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """The values of all arguments by name, and all that is wrong with them."""
    taken: dict[str, Any] = {}
    faults = []
    for argument in arguments:
        try:
            taken |= value(argument)
        except ConfigFault as fault:
            faults += fault.lines()
    return taken, faults


def split(
    argument: str, names: Sequence[str], switches: Sequence[str] = ("json",)
) -> tuple[str, str]:
    """--heads=8 as (heads, 8); --json, a switch, takes no value: (json, ""). Raises ConfigFault."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--"):
        raise ConfigFault(f"{argument}: left over")
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        meant = f": did you mean --{near[0]}?" if near else f"; known: {', '.join(names)}"
        raise ConfigFault(f"--{name}: unknown flag{meant}")
    if name in switches:
        if equals:
            raise ConfigFault(f"{argument}: --{name} takes no value")
        return name, ""
    if not text:
        raise ConfigFault(f"--{name} has no value: wanted --{name}=VALUE")
    return name, text


def chosen(argument: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """A comma list of known names. Raises ConfigFault."""
    parts = tuple(text.split(","))
    for part in parts:
        if part not in known:
            raise ConfigFault(f"{argument}: {part!r} is unknown; known: {', '.join(known)}")
    return parts


def one_of(argument: str, text: str, known: Sequence[str]) -> str:
    """A known name. Raises ConfigFault."""
    if text not in known:
        raise ConfigFault(f"{argument}: {text!r} is unknown; known: {', '.join(known)}")
    return text


def positive(argument: str, text: str) -> int:
    """Raises ConfigFault unless the text is a whole number above 0."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ConfigFault(f"{argument}: wanted whole numbers above 0, found {text!r}")
    return int(text)


def counted(argument: str, text: str) -> int:
    """Raises ConfigFault unless the text is a whole number, which may be 0."""
    if not (text.isascii() and text.isdecimal()):
        raise ConfigFault(f"{argument}: wanted a whole number, found {text!r}")
    return int(text)
