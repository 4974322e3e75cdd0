"""How often a while loop of scheduled HLO runs, where that is known before it does.

Either XLA says so, or the loop counts as JAX's do: from a constant, by one, as long as it is less than
a constant, which may come in as an element of the loop's tuple.
"""

from __future__ import annotations

import re

from ringflash.plan.hlo import Computation, Instruction, Module

KNOWN = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)')
PASSED_ON = ("copy", "bitcast", "copy-start", "copy-done", "reshape", "convert")


def trips_of(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Of a `while` in `computation`."""
    known = KNOWN.search(loop.rest)
    if known:
        return int(known[1])
    (name,) = loop.called("condition")
    condition = module.computations[name]
    test = condition.root
    if test.opcode != "compare" or "direction=LT" not in test.rest:
        return None
    start, limit = (value(computation, loop, condition, *operand) for operand in test.taken)
    return None if start is None or limit is None else max(0, limit - start)


def value(
    computation: Computation,
    loop: Instruction,
    condition: Computation,
    name: str,
    element: int | None,
) -> int | None:
    """What a name in the condition, or an element of its tuple, is before the first turn."""
    one = condition.by_name.get(name)
    if one is not None and one.opcode == "get-tuple-element":
        _, element = one.taken[0]
    if element is None:
        return constant(condition, name)
    start = computation.by_name.get(loop.operands[0])
    if start is None or start.opcode != "tuple":
        return None
    return constant(computation, *start.taken[element])


def constant(computation: Computation, name: str, element: int | None = None) -> int | None:
    """The whole number that a name stands for, or None; an element of a tuple is computed."""
    one = computation.by_name.get(name)
    while one is not None and element is None and one.opcode in PASSED_ON:
        name, element = one.taken[0]
        one = computation.by_name.get(name)
    if one is None or one.opcode != "constant" or not re.fullmatch(r"-?\d+", one.inside):
        return None
    return int(one.inside)
