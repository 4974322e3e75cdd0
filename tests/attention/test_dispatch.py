"""Names, what `auto` takes, and the reasons it gives."""

import logging

import pytest

from ringflash.attention import (
    KERNELS,
    STRATEGIES,
    Kernel,
    Spec,
    dispatch,
    make_kernel,
    make_strategy,
)
from ringflash.attention.axis import Factor
from ringflash.attention.spec import Request

REQUEST = Request(1, 64, 64, 4, 2, 16, 16, "float32", "cpu", Spec())


def refusing(name, reason):
    def make(spec):
        kernel = KERNELS["reference"](spec)
        return Kernel(name, spec, kernel.forward, kernel.backward, (), lambda request: reason)

    return make


@pytest.mark.parametrize("name", KERNELS)
def test_by_name(name):
    kernel = make_kernel(name, REQUEST)
    assert (kernel.name, kernel.spec, kernel.axes) == (name, REQUEST.spec, ())


def test_auto_takes_the_first_that_serves_and_says_what_was_passed_over(monkeypatch, caplog):
    monkeypatch.setitem(dispatch.KERNELS, "picky", refusing("picky", "head_dim 16 is not 128"))
    monkeypatch.setitem(dispatch.AUTO, "cpu", ("picky", "chunked"))
    dispatch.tell.cache_clear()
    with caplog.at_level(logging.INFO):
        assert make_kernel("auto", REQUEST).name == "chunked"
        make_kernel("auto", REQUEST)
    said = "attention kernel auto: chunked serves (picky: head_dim 16 is not 128)"
    assert caplog.messages == [said]  # once


def test_auto_never_takes_the_reference():
    assert make_kernel("auto", REQUEST).name == "chunked"


def test_every_reason_is_listed_where_none_serves(monkeypatch):
    monkeypatch.setitem(dispatch.KERNELS, "picky", refusing("picky", "head_dim 16 is not 128"))
    monkeypatch.setitem(dispatch.KERNELS, "proud", refusing("proud", "wants a GPU, found cpu"))
    monkeypatch.setitem(dispatch.AUTO, "cpu", ("picky", "proud"))
    both = "no attention kernel can serve .*: picky: head_dim 16 is not 128; proud: wants a GPU"
    with pytest.raises(ValueError, match=both):
        make_kernel("auto", REQUEST)
    with pytest.raises(ValueError, match=r"can serve .*: proud: wants a GPU, found cpu"):
        make_kernel("proud", REQUEST)


def test_unknown_kernel():
    with pytest.raises(ValueError, match="'flush' is unknown; known: auto, chunked, reference"):
        make_kernel("flush", REQUEST)


def placed(spelling, monkeypatch):
    """The factors of the axis that each part is given, the outermost first."""
    seen = []

    def spy(name):
        def strategy(kernel, axis):
            seen.append((name, axis.size, axis.stride))
            return kernel

        return strategy

    for name in list(STRATEGIES):
        monkeypatch.setitem(dispatch.STRATEGIES, name, spy(name))
    make_strategy(spelling)(None, "context")
    return seen[::-1]


@pytest.mark.parametrize(
    ("spelling", "wanted"),
    [
        ("ulysses:2*ring:4", [("ulysses", 2, 1), ("ring", 4, 2)]),
        ("ring:4*ulysses:2", [("ring", 4, 2), ("ulysses", 2, 1)]),
        ("ring:2*ring:4", [("ring", 2, 4), ("ring", 4, 1)]),
        (
            "ring:2*all_gather:2*ulysses:2",
            [("ring", 2, 4), ("all_gather", 2, 2), ("ulysses", 2, 1)],
        ),
    ],
)
def test_ulysses_is_given_neighbours(spelling, wanted, monkeypatch):
    assert placed(spelling, monkeypatch) == wanted


def test_a_bare_name_has_the_whole_axis(monkeypatch):
    seen = []
    monkeypatch.setitem(dispatch.STRATEGIES, "ring", lambda kernel, axis: seen.append(axis))
    make_strategy("ring")(None, ("outer", "inner"))
    make_strategy("ring:8")(None, "context")
    assert seen == [("outer", "inner"), Factor("context", 8, 1)]
