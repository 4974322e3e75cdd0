"""What XLA's own instructions move through HBM, and which of them do nothing else."""

from __future__ import annotations

from ringflash.plan.hlo import Computation, Instruction, Module

# These cost nothing; of others the cost is told elsewhere, or is not known.
NAMELESS = (
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "iota",
    "partition-id",
)
FREE = (
    *NAMELESS,
    "while",
    "conditional",
    "call",
    "custom-call",
    "after-all",
    "recv",
    "optimization-barrier",
)
MOVES = (
    *("copy", "transpose", "reshape", "slice", "concatenate", "pad", "reverse", "broadcast"),
    *("dynamic-slice", "dynamic-update-slice", "bitcast-convert", "gather", "convert"),
)
PARTS = {
    "slice",
    "dynamic-slice",
    "gather",
}  # read as much as they give, not all that they are given
# XLA joins arrays by padding both and taking the maximum, the sum or the bits of both.
JOINS = ("maximum", "add", "or")


def codes_of(module: Module, one: Instruction) -> set[str]:
    """The opcodes of a fusion, or its own."""
    if one.opcode != "fusion":
        return {one.opcode}
    return {
        x.opcode for name in one.called("calls") for x in module.computations[name].instructions
    }


def is_move(codes: set[str]) -> bool:
    """Whether these only put bytes elsewhere: no arithmetic but what joins padded arrays."""
    allowed = {*FREE, *MOVES, *(JOINS if "pad" in codes else ())}
    return codes <= allowed and bool(codes & {*MOVES} - {"broadcast", "convert"})


def traffic(computation: Computation, one: Instruction, codes: set[str]) -> int:
    """Bytes between HBM and the core, at most: each operand read and each result written once."""
    known = computation.by_name
    read = [known[name].hbm(element) for name, element in one.taken if name in known]
    if "dynamic-update-slice" in codes and read:  # in place: as much is written as is put in
        return 2 * (sum(read) - max(read))
    if codes & PARTS:
        read = [min(n, sum(one.results)) for n in read]
    return sum(read) + one.hbm()
