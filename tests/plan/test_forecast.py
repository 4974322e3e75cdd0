"""Strategies compared without a compiler, by figures that can be worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_devices import fake_slice

from ringflash.attention import Causal, Full, Window
from ringflash.attention.kernels.mosaic.tiles import cycles
from ringflash.plan import links
from ringflash.plan.auto import strategy_for
from ringflash.plan.forecast import Job, candidates, choose, forecast

JOB = Job("v6e", (2, 4), 8, 1, Full(), "contiguous", 65536, 1, 32, 8, 128)
SIZES = {"seq_len": 65536, "rows": 1, "heads": 32, "kv_heads": 8, "head_dim": 128}
TILES = sum(cycles("v6e", direction, 128)[0] for direction in ("forward", "backward"))


def test_kernels_take_the_cycles_of_their_tiles_whatever_the_strategy():
    """64 x 64 tiles of 32 heads over eight devices."""
    wanted = 64 * 64 * 32 / 8 * TILES / 1.75e9
    for strategy in candidates(8, 8):
        assert forecast(JOB, strategy).kernel_seconds == pytest.approx(wanted)


def test_a_causal_ring_waits_for_its_slowest_device_at_each_hop():
    even, uneven = (
        forecast(replace(JOB, mask=Causal(), layout=layout), "ring").kernel_seconds
        for layout in ("zigzag", "contiguous")
    )
    assert uneven > 1.7 * even


def test_a_ring_of_long_kernels_hides_all():
    assert forecast(JOB, "ring").exposed_seconds == 0


def test_of_a_ring_of_short_kernels_the_rest_is_exposed():
    """256 tokens a device: seven hops of K and V in each pass, in 2 bytes, half of 8 heads each way; eight of
    dk and dv, in 4."""
    job = replace(JOB, seq_len=2048)
    found = forecast(job, "ring")
    keys, sums = 256 * (8 * 128 * 2 + 8) / 100e9, 256 * 8 * 128 * 4 / 100e9
    assert found.exposed_seconds + found.kernel_seconds > 14 * keys + 8 * sums
    slower = replace(job, hop_links=3)
    more = forecast(slower, "ring").exposed_seconds - found.exposed_seconds
    assert more == pytest.approx(2 * (14 * keys + 8 * sums))


def test_a_window_takes_the_hops_that_it_needs():
    """A window of 4,096 over shards of 16,384: one hop up, under half of the block at home. dk and dv go out
    under that, once more under the block before, whose pairs are too few, and home under the other half."""
    mask = Causal() & Window(4096)
    job = replace(JOB, shape=(8, 8), shards=64, mask=mask, seq_len=2**20)
    assert job.near(1) == (1, 0)
    found = forecast(job, "ring")
    sums = 16384 * 8 * 128 * 2 * 4 / 100e9
    assert 0 < found.exposed_seconds < sums
    tiles = 16 * 4.5 * 32 * TILES / 1.75e9  # of 1,024 x 1,024, in the mean: four and a half a row
    assert tiles < found.kernel_seconds < 1.3 * tiles
    assert choose(job)[0][0].strategy == "ring"
    assert replace(job, mask=Causal() & Window(2**19)).near(1) is None
    assert replace(job, mask=Window(4096, 4096)).near(4) == (1, 1)


def test_ulysses_exchanges_what_it_holds():
    """q, k and v in 2 bytes and out in 4; then q, dout, k and v, and dq, dk and dv."""
    q, kv = 8192 * 32 * 128, 2 * 8192 * 8 * 128
    held = 2 * (q + kv) + 4 * q + 2 * (2 * q + kv) + 4 * (q + kv)
    wanted = links.exchange_seconds("v6e", held, (2, 4))
    assert forecast(JOB, "ulysses").exposed_seconds == pytest.approx(wanted)


def test_all_gather_takes_the_keys_of_the_others():
    own = 2 * 8192 * 8 * 128
    wanted = links.gather_seconds("v6e", 7 * own * (2 + 6), (2, 4))
    assert forecast(JOB, "all_gather").exposed_seconds == pytest.approx(wanted)


def test_a_ring_around_ulysses_passes_devices_over():
    """Its hops are four links long, and their kernels are all a device has."""
    job = replace(JOB, seq_len=2048)
    both = forecast(job, "ulysses:4*ring:2")
    inner = replace(JOB, shape=(4,), shards=4, seq_len=1024)
    exchange = forecast(inner, "ulysses").exposed_seconds
    keys, sums = 4 * 1024 * (2 * 128 * 2 + 8) / 100e9, 4 * 1024 * 2 * 128 * 4 / 100e9
    hops = [keys, keys, sums, sums]
    assert both.kernel_seconds == pytest.approx(forecast(job, "ulysses").kernel_seconds)
    rest = both.exposed_seconds - exchange
    assert sum(hops) - both.kernel_seconds < rest < sum(hops)


def test_long_sequences_take_the_ring_and_short_ones_what_is_quicker():
    assert choose(JOB)[0][0].strategy == "ring"
    short = Job("v5p", (4, 4, 4), 64, 1, Causal(), "zigzag", 16384, 1, 32, 8, 128)
    served, _ = choose(short)
    assert served[0].strategy == "all_gather"
    assert [x.total_seconds for x in served] == sorted(x.total_seconds for x in served)


def test_what_cannot_share_the_heads_out_says_why():
    served, refused = choose(replace(JOB, heads=12, kv_heads=4))
    assert "ulysses" not in {one.strategy for one in served}
    assert refused["ulysses"].startswith("ulysses over 8 devices needs query heads in a multiple")


def mesh(devices, context):
    """As `mesh.make_mesh` gives it, as far as it is looked at."""
    array = np.array(devices, dtype=object).reshape(-1, 1, context, 1)
    names = ("data", "fsdp", "context", "tensor")
    return SimpleNamespace(
        devices=array, axis_names=names, shape=dict(zip(names, array.shape, strict=True))
    )


def test_auto_on_a_slice_tells_what_each_would_take():
    slice_ = mesh(fake_slice((2, 4, 1), kind="TPU v6 lite"), 8)
    found = strategy_for(slice_, Causal(), "zigzag", **SIZES)
    assert found.strategy == "ring"
    for name in candidates(8, 8):
        assert f"{name} " in found.why
    assert strategy_for(slice_, Causal(), "balanced", **SIZES) == found


def test_auto_without_figures_takes_the_ring():
    known = mesh(fake_slice((2, 4, 1), kind="TPU v6 lite"), 1)
    assert "one device" in strategy_for(known, Causal(), "zigzag", **SIZES).why
    for kind in ({"kind": "TPU v99"}, {"kind": "cpu"}):
        found = strategy_for(mesh(fake_slice((2, 4, 1), **kind), 8), Causal(), "zigzag", **SIZES)
        assert found.strategy == "ring"
        assert found.why == f"no cycles and links are known of {kind['kind']}"
