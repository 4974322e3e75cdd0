import io

import pytest

from ringflash.observe.table import table


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_and_aligned_where_there_is_no_terminal():
    out = io.StringIO()
    table("run", [("devices", "8 cpu"), ("kernel", "chunked " * 20 + "end")], stream=out)
    assert out.getvalue().splitlines() == [
        "run",
        "  devices  8 cpu",
        "  kernel   " + "chunked " * 20 + "end",
    ]


def test_numbers_below_a_header_end_together():
    out = io.StringIO()
    table("eval", [("0-512", "9.5"), ("all", "10.25")], header=("tokens", "ppl"), stream=out)
    assert out.getvalue().splitlines() == [
        "eval",
        "  tokens    ppl",
        "  0-512     9.5",
        "  all     10.25",
    ]


@pytest.mark.parametrize("header", [(), ("what", "value")])
def test_boxed_on_a_terminal(header):
    out = Terminal()
    table("run", [("mesh", "[context=8]")], header=header, stream=out)
    text = out.getvalue()
    assert "[context=8]" in text
    assert "mesh" in text
    assert all(name in text for name in header)
    assert len(text.splitlines()) == (6 if header else 4)


def test_rows_of_different_width_are_a_mistake():
    with pytest.raises(AssertionError):
        table("run", [("a", "b"), ("c",)], stream=io.StringIO())
