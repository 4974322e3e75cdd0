"""Generations of TPUs and slices of them, by name."""

import pytest

from ringflash.exits import ConfigFault
from ringflash.plan.generations import GENERATIONS, of_device_kind, topology


@pytest.mark.parametrize(
    ("text", "generation", "name"),
    [
        ("v4", "v4", "v4:2x2x1"),
        ("v5e", "v5e", "v5e:2x2"),
        ("v5e:4x8", "v5e", "v5e:4x8"),
        ("v5p:2x2x1", "v5p", "v5p:2x2x1"),
        ("v5p:4x4x8", "v5p", "v5p:4x4x8"),
        ("v6e", "v6e", "v6e:2x2"),
        ("7x", "7x", "tpu7x:2x2x1"),
        ("tpu7x:2x2x1", "7x", "tpu7x:2x2x1"),
        ("7x:2x2x4", "7x", "tpu7x:2x2x4"),
    ],
)
def test_names(text, generation, name):
    found = topology(text)
    assert (found.generation.name, found.name) == (generation, name)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "v5x",
            "'v5x' is no TPU generation: did you mean v5p?; known: v4, v5e, v5p, v6e, 7x, alone",
        ),
        ("h100", "'h100' is no TPU generation; known: v4,"),
        ("", "'' is no TPU generation; known: v4,"),
        ("v5p:2x2", "'v5p:2x2': the shape of a v5p slice is 3 numbers such as 2x2x1, found 2x2"),
        ("v5e:2x2x1", "the shape of a v5e slice is 2 numbers such as 2x2, found 2x2x1"),
        ("v5e:", "2 numbers such as 2x2, found nothing"),
        ("v5e:0x2", "found 0x2"),
        ("v5e:2x2 ", "found 2x2"),
    ],
)
def test_wrong_names(text, line):
    with pytest.raises(ConfigFault) as told:
        topology(text)
    assert line in told.value.lines()[0]


def test_device_kinds():
    assert of_device_kind("TPU v5 lite") is GENERATIONS["v5e"]
    assert of_device_kind("TPU v5") is GENERATIONS["v5p"]
    assert of_device_kind("TPU7x") is GENERATIONS["7x"]
    assert of_device_kind("cpu") is None
    kinds = [kind for g in GENERATIONS.values() for kind in g.device_kinds]
    assert len(set(kinds)) == len(kinds)


def test_hbm_in_cycles():
    assert GENERATIONS["v5e"].hbm_bytes_per_cycle == pytest.approx(0.82e12 / 1.5e9)
