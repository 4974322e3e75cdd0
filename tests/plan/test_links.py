"""Links of each generation and the time that bytes take over them."""

import pytest

from ringflash.plan import links
from ringflash.plan.generations import GENERATIONS


def test_every_generation_has_links():
    assert links.LINKS.keys() == GENERATIONS.keys()
    assert [name for name, found in links.LINKS.items() if found.assumed] == ["v4"]


def test_a_hop_takes_its_bytes_over_one_link_and_longer_hops_share_links():
    assert links.hop_seconds("v5e", 50e9) == pytest.approx(1)
    assert links.hop_seconds("v5p", 50e9) == pytest.approx(0.5)
    assert links.hop_seconds("v5p", 50e9, links=3) == pytest.approx(1.5)
    assert links.hop_seconds("7x", 50e9, links=0) == links.hop_seconds("7x", 50e9, links=1)


@pytest.mark.parametrize(
    ("generation", "shape", "ways"),
    [
        ("v6e", (2, 4), 2),  # a corner of an open grid has two links
        ("v6e", (16, 16), 4),
        ("v6e", (4, 16), 3),
        ("v5p", (2, 2, 1), 2),
        ("v5p", (4, 4, 8), 6),
    ],
)
def test_a_gather_takes_all_links_of_a_corner(generation, shape, ways):
    rate = links.LINKS[generation].bytes_per_s
    assert links.gather_seconds(generation, 1e9, shape) == pytest.approx(1e9 / rate / ways)


def test_the_devices_of_a_chip_share_its_links():
    twice = links.gather_seconds("7x", 1e9, (4, 4, 4)) / links.gather_seconds("v5p", 1e9, (4, 4, 4))
    assert twice == pytest.approx(2)


def test_an_exchange_over_a_ring_of_16():
    """A byte passes 4 links on average, and a chip has two of them along the axis."""
    assert links.exchange_seconds("v6e", 100e9, (16, 16)) == pytest.approx(2)
    assert links.exchange_seconds("v6e", 100e9, (16, 1)) == pytest.approx(2)


def test_an_exchange_of_two_sends_half_over_one_link():
    assert links.exchange_seconds("v6e", 100e9, (2, 1)) == pytest.approx(0.5)


def test_an_exchange_is_slower_where_nothing_wraps():
    wrapped = links.exchange_seconds("v6e", 1e9, (16, 1)) / 16
    assert links.exchange_seconds("v6e", 1e9, (8, 1)) / 8 > wrapped


def test_between_slices():
    assert links.dcn_seconds(6.25e9) == pytest.approx(1)


def test_shapes():
    assert links.shape_of("tpu7x:2x2x4") == (2, 2, 4)
    assert links.chips("v6e:16x16") == 256
