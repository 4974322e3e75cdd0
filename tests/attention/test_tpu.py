"""The TPU kernel in Pallas' TPU interpreter against the reference in fp64, and that its copies do not race.

The interpreter fills scratch with NaN and moves copies when they are waited for (with `detect_races`, at
once), so what is read too early or too late is seen. Its tiles are never below 128, and most `CASES` fit one:
those of `MANY` have up to six, so that the four slots of streamed tiles are used again.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expected import TOLERANCE, check, errors, jitted, norm, over, plain, results, truth, truth_of
from jax.experimental.pallas import tpu as pltpu
from test_strategies import laid_out, put_back

from ringflash.attention import (
    FLOOR,
    LAYOUTS,
    PADDING,
    Causal,
    Chunked,
    Full,
    Grads,
    Partial,
    Prefix,
    Spec,
    Tokens,
    Window,
    differentiable,
    make_kernel,
)
from ringflash.attention.cases import CASES, Case, inputs
from ringflash.attention.kernel import merge, row_dot
from ringflash.attention.kernels.mosaic import backward_call, forward_call
from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.attention.kernels.tpu import tpu
from ringflash.attention.mask import Mask
from ringflash.attention.spec import Request
from ringflash.attention.tile import alibi

FORMS = [(True, True), (True, False), (False, True), (False, False)]  # keys_down, turned
RACING = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
SERVED = [case for case in CASES if case.bias is None and not case.dropout]
REFUSED = [case for case in CASES if case not in SERVED]
LOW = [
    case
    for case in SERVED
    if case.name
    in (
        "mqa",
        "width_64",
        "width_256",
        "wider_values",
        "length_1001",
        "cross",
        "window_both_sides",
        "prefix",
        "packed",
        "softcap",
        "sinks_on_padding",
    )
]
MANY = (
    Case("one_head_a_group", B=1, T=600, N=2, K=2),
    Case("three_heads_a_group", B=1, T=600, N=3, K=1),
    Case("packed", T=520, documents=(250, 3, 130, 100)),
    Case("windowed", B=1, T=650, mask=Causal() & Window(150), softcap=2.0),
    Case("both_bounds", B=1, T=400, mask=Window(90, 140) & Chunked(300), sinks=True),
    Case("few_queries", B=1, T=129, S=700, mask=Full()),
    Case("few_keys", B=1, T=700, S=100, mask=Prefix(150), N=3, K=3),
    Case("steps_without_units", B=2, T=650, S=390, mask=Causal() & Window(60), q_start=250),
    Case("rows_without_units", T=390, documents=(), k_documents=(300,)),
    Case("documents_of_one_row", T=390, mask=Full(), documents=(0, 380), k_documents=(130, 200)),
    Case("one_more_than_a_tile", B=1, T=129),
)  # fmt: skip
BY_NAME = {case.name: case for case in MANY}
REQUEST = Request(1, 256, 256, 4, 2, 64, 64, "bfloat16", "tpu", Spec())


def make(spec, *, held=2, form=FORMS[0], interpret=None, chunk=64):
    """The kernel with tiles so small that there are many."""
    return tpu(
        spec,
        tiles=(Tiles(128, 128, chunk, held), Tiles(128, 128, chunk, held, *form)),
        interpret=pltpu.InterpretParams() if interpret is None else interpret,
    )


def turn_about(cases, *others):
    """Each case once, with each of the others in turn."""
    return [
        pytest.param(case, *(each[n % len(each)] for each in others), id=case.name)
        for n, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("case", "form"), turn_about(SERVED, FORMS))
def test_fp32(case, form):
    found = results(differentiable(make(case.spec, form=form)), inputs(case))
    check(found, truth_of(case))
    assert all(array.dtype == np.float32 for array in found.values() if array is not None)


@pytest.mark.parametrize(("case", "form"), turn_about(LOW, FORMS[1:] + FORMS[:1]))
def test_bf16_is_at_most_twice_as_far_off_as_plain_bf16(case, form):
    low_precision(case, form, jnp.bfloat16)


def test_fp16_is_at_most_twice_as_far_off_as_plain_fp16():
    low_precision(Case("", B=1, T=200, softcap=3.0, sinks=True), FORMS[0], jnp.float16)


def low_precision(case, form, dtype):
    x, wanted = inputs(case), truth_of(case, dtype)
    usual = errors(results(plain(case.spec), x, dtype=dtype), wanted, norm)
    found = results(differentiable(make(case.spec, form=form)), x, dtype=dtype)
    off = errors(found, wanted, norm)
    assert all(off[n] <= 2 * usual[n] + TOLERANCE for n in off), f"errors {off}, plain {usual}"
    low = {"out", "dq", "dk", "dv"}
    assert all(found[n].dtype == (dtype if n in low else np.float32) for n in usual)


@pytest.mark.parametrize(("case", "held", "form"), turn_about(MANY, [1, 2, 3], FORMS))
def test_many_tiles(case, held, form):
    found = results(differentiable(make(case.spec, held=held, form=form)), inputs(case))
    check(found, truth_of(case))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("held", [1, 3])
def test_every_form(held, form):
    """Three heads a group, documents, all tests of tiles."""
    case = Case("", B=1, T=400, N=3, K=1, mask=Causal() & Window(200), documents=(190, 150))
    kernel = make(case.spec, held=held, form=form, chunk=96)
    check(results(differentiable(kernel), inputs(case)), truth_of(case))
