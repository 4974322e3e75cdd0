"""The TPU kernel in Pallas' TPU interpreter against the reference in fp64, and that its copies do not race.

The interpreter fills scratch with NaN and moves copies when they are waited for (with `detect_races`, at
once), so what is read too early or too late is seen. Its tiles are never below 128, and most `CASES` fit one:
those of `MANY` have up to six, so that the four slots of streamed tiles are used again.
"""

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
from ringflash.attention.kernels.mosaic import backward_call, forward, forward_call
from ringflash.attention.kernels.mosaic.put import put
from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.attention.kernels.tpu import tpu
from ringflash.attention.mask import Mask
from ringflash.attention.spec import Request
from ringflash.attention.tile import alibi

FORMS = [(True, True), (True, False), (False, True), (False, False)]  # keys_down, turned
# XLA's simplifier makes of dot(a, b).T in bf16 a product that its CPU runtime refuses (jaxlib 0.10 to 0.12).
OPTIONS = {"xla_disable_hlo_passes": "algsimp"}
RACING = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
SERVED = [case for case in CASES if case.bias is None and not case.dropout]
REFUSED = [case for case in CASES if case not in SERVED]
LOW = [
    case
    for case in SERVED
    if case.name
    in (
        "mqa",
        "wider_values",
        "length_1001",
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


@pytest.fixture(autouse=True)
def _interpreter():
    """What a kernel that failed leaves behind has the next one wait for ever."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def make(spec, *, held=2, form=FORMS[0], interpret=None, chunk=128, kind=None):
    """The kernel with tiles so small that there are many."""
    return tpu(
        spec,
        device_kind=kind,
        tiles=(Tiles(128, 128, chunk, held), Tiles(128, 128, chunk, held, *form)),
        interpret=pltpu.InterpretParams() if interpret is None else interpret,
    )


def turn_about(cases, *others):
    """Each case once, with each of the others in turn."""
    return [
        pytest.param(case, *(each[n % len(each)] for each in others), id=case.name)
        for n, case in enumerate(cases)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "form"), turn_about(SERVED, FORMS))
def test_fp32(case, form):
    found = results(differentiable(make(case.spec, form=form)), inputs(case))
    check(found, truth_of(case))
    assert all(array.dtype == np.float32 for array in found.values() if array is not None)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "form"), turn_about(LOW, FORMS[1:] + FORMS[:1]))
def test_bf16_is_at_most_twice_as_far_off_as_plain_bf16(case, form):
    low_precision(case, form, jnp.bfloat16)


def test_fp16_is_at_most_twice_as_far_off_as_plain_fp16():
    low_precision(Case("", B=1, T=200, softcap=3.0, sinks=True), FORMS[0], jnp.float16)


def low_precision(case, form, dtype):
    """lse and dsinks apart: q times scale and log2(e) is rounded once more, the plain one scales in fp32."""
    x, wanted = inputs(case), truth_of(case, dtype)
    usual = errors(results(plain(case.spec), x, dtype=dtype), wanted, norm)
    for name in usual.keys() & {"lse", "dsinks"}:
        usual[name] += float(jnp.finfo(dtype).eps) / 16
    attention = differentiable(make(case.spec, form=form))
    found = jax.jit(lambda x: results(attention, x, dtype=dtype), compiler_options=OPTIONS)(x)
    off = errors(found, wanted, norm)
    assert all(off[n] <= 2 * usual[n] + TOLERANCE for n in off), f"errors {off}, plain {usual}"
    low = {"out", "dq", "dk", "dv"}
    assert all(found[n].dtype == (dtype if n in low else np.float32) for n in usual)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "held", "form"), turn_about(MANY, [1, 2, 3], FORMS))
def test_many_tiles(case, held, form):
    found = results(differentiable(make(case.spec, held=held, form=form, chunk=64)), inputs(case))
    check(found, truth_of(case))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "held"), list(zip(FORMS, (1, 3, 3, 1), strict=True)))
def test_every_form(form, held):
    """Three heads a group, documents, all tests of tiles: as a v5e makes them, all at once."""
    case = Case("", B=1, T=400, N=3, K=1, mask=Causal() & Window(200), documents=(190, 150))
    kernel = make(case.spec, held=held, form=form, chunk=96, kind="TPU v5 lite")
    check(results(differentiable(kernel), inputs(case)), truth_of(case))


def halves(x, cut):
    """(k, v, tokens) before and after `cut`."""
    k, v = jnp.asarray(x.k_BSKH), jnp.asarray(x.v_BSKH)
    return [
        (k[:, part], v[:, part], Tokens(*(a[:, part] for a in x.k_at[:2])))
        for part in (slice(None, cut), slice(cut, None))
    ]


def test_carry_continues():
    """The keys in two parts, the second continuing from the first: merged, and the whole."""
    case = BY_NAME["packed"]
    x, kernel = inputs(case), make(case.spec)
    first, second = halves(x, 137)

    @jax.jit
    def run(q):
        a = kernel.forward(q, *first[:2], x.q_at, first[2])
        b = kernel.forward(q, *second[:2], x.q_at, second[2])
        return kernel.forward(q, *second[:2], x.q_at, second[2], a), merge(a, b)

    found, merged = run(jnp.asarray(x.q_BTNH))
    whole = make_kernel("reference", REQUEST._replace(spec=case.spec)).forward(
        *map(jnp.asarray, x[:3]), x.q_at, x.k_at
    )
    for a, b, c in zip(found, merged, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=2e-6)


def test_carry_survives_rows_that_see_nothing():
    """What was merged before stays as it is, and FLOOR stays FLOOR."""
    x = inputs(Case("", B=1, T=200))
    padding = np.full_like(x.k_at.segment_ids_BT, PADDING)
    some = np.arange(200) % 2 > 0
    lse = np.where(some, 200.0, FLOOR).astype(np.float32) + np.zeros_like(x.dlse_BNT)
    carry = Partial(jnp.where(some[:, None, None], x.dout_BTNH, 0.0), jnp.asarray(lse))
    arrays = [jnp.asarray(a) for a in x[:3]]
    forward = jax.jit(make(Spec()).forward)
    for shift in (0, 1000):  # no units at all; and units of which some rows see no key
        k_at = Tokens(x.k_at.positions_BT + 150, padding if shift else x.k_at.segment_ids_BT)
        out, lse = forward(*arrays, x.q_at, k_at, carry)
        blind = slice(0, 200 if shift else 150)
        np.testing.assert_allclose(out[:, blind], carry.out_BTNH[:, blind], rtol=1e-6)
        np.testing.assert_allclose(lse[..., blind], carry.lse_BNT[..., blind], rtol=1e-6)
        assert shift or (np.asarray(lse)[..., 150::2] > FLOOR).all()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS[1:3])
def test_backward_adds_into_what_it_is_given(form):
    """dq of two parts of the keys, each added to what was there; a field that is None is nothing yet."""
    case = BY_NAME["packed"]
    x, kernel = inputs(case), make(case.spec, form=form)
    q, dout = jnp.asarray(x.q_BTNH), jnp.asarray(x.dout_BTNH)
    part = make_kernel("reference", REQUEST._replace(spec=case.spec)).forward(
        q, *map(jnp.asarray, x[1:3]), x.q_at, x.k_at
    )
    rest = (dout, part.lse_BNT, row_dot(dout, part.out_BTNH))
    (k0, v0, at0), (k1, v1, at1) = halves(x, 137)
    backward = jax.jit(kernel.backward)
    whole = backward(q, x.k_BSKH, x.v_BSKH, x.q_at, x.k_at, *rest)
    first = backward(q, k0, v0, x.q_at, at0, *rest, Grads(3.0 * q, None, None))
    into = Grads(first.dq_BTNH, 2.0 * k1, 5.0 * v1)
    second = backward(q, k1, v1, x.q_at, at1, *rest, into)
    found = Grads(
        second.dq_BTNH,
        jnp.concatenate([first.dk_BSKH, second.dk_BSKH], 1),
        jnp.concatenate([first.dv_BSKH, second.dv_BSKH], 1),
    )
    wanted = Grads(
        whole.dq_BTNH + 3.0 * q,
        whole.dk_BSKH.at[:, 137:].add(2.0 * k1),
        whole.dv_BSKH.at[:, 137:].add(5.0 * v1),
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_rows_that_see_nothing():
    """Out 0, gradients 0, lse FLOOR: queries before every key, and padding on either side."""
    case = Case("", B=1, T=300, documents=(300,))
    x = inputs(case)
    x.k_at.positions_BT[:] += 140  # queries 0 ... 139 are before every key
    x.k_at.segment_ids_BT[:, 130:] = PADDING
    x.q_at.segment_ids_BT[:, 290:] = PADDING
    found = results(differentiable(make(case.spec)), x)
    blind = np.r_[0:140, 290:300]
    np.testing.assert_array_equal(found["out"][:, blind], 0)
    np.testing.assert_array_equal(found["dq"][:, blind], 0)
    np.testing.assert_array_equal(found["lse"][..., blind], np.float32(FLOOR))
    np.testing.assert_array_equal(found["dk"][:, 130:], 0)
    np.testing.assert_array_equal(found["dv"][:, 130:], 0)
    check(found, truth(case.spec, x))


@pytest.mark.slow
def test_padding_behind_a_causal_sequence_reaches_nothing():
    """As `attend` and the ring pad without documents: zeros at position 0, whatever the passes' tiles are."""
    case = Case("", B=1, T=512)
    x, real = inputs(case), 300
    for array in (x.q_BTNH, x.k_BSKH, x.v_BSKH, x.dout_BTNH):
        array[:, real:] = 0
    x.dlse_BNT[..., real:] = 0
    for at in (x.q_at, x.k_at):
        at.positions_BT[:, real:] = 0
        at.segment_ids_BT[:, real:] = PADDING
    tiles = Tiles(128, 128, 128, 1), Tiles(256, 128, 128, 1)
    kernel = tpu(case.spec, tiles=tiles, interpret=pltpu.InterpretParams())
    found = results(differentiable(kernel), x)
    wanted = truth(case.spec, x)
    for name in ("out", "dq", "dk", "dv"):
        a, b = (np.asarray(found_[name])[:, :real] for found_ in (found, wanted))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5, err_msg=name)


def races(kernel, x, capsys):
    """Whether the interpreter found any: the one of JAX 0.10 prints it, that of 0.12 raises."""
    told = ""
    try:
        separately(kernel, x)
    except jax.errors.JaxRuntimeError as error:
        told = str(error)
        if "RACE DETECTED" not in told:
            raise
    return "RACE DETECTED" in told + capsys.readouterr().out


def separately(kernel, x):
    """The forward and then the backward, each a program of its own."""
    q, k, v, dout = (jnp.asarray(a) for a in (x.q_BTNH, x.k_BSKH, x.v_BSKH, x.dout_BTNH))
    part = jax.jit(kernel.forward)(q, k, v, x.q_at, x.k_at)
    rest = (dout, part.lse_BNT, row_dot(dout, part.out_BTNH))
    grads = jax.jit(kernel.backward)(q, k, v, x.q_at, x.k_at, *rest)
    return jax.block_until_ready((part, grads))


RACES = [
    (Case("", B=2, T=600, N=1, K=1), 1, FORMS[0]),
    (Case("", B=1, T=400, N=3, K=1, mask=Full()), 2, FORMS[1]),
    (Case("", B=2, T=650, S=390, N=2, K=1, mask=Causal() & Window(60), q_start=250), 1, FORMS[2]),
    (Case("", B=2, T=390, N=2, K=2, documents=(250, 100)), 3, FORMS[3]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "held", "form"), RACES)
def test_no_races(capsys, case, held, form):
    """Copies run while units are computed: none may touch what a unit still uses, or will use."""
    assert not races(make(case.spec, held=held, form=form, interpret=RACING), inputs(case), capsys)


def test_a_race_would_be_seen_in_the_forward(capsys, monkeypatch):
    """With half of the slots the next tile lands on one that is in use."""
    for module in (forward, forward_call):
        monkeypatch.setattr(module, "SLOTS", 2)
    case = RACES[0][0]
    assert races(make(case.spec, held=1, interpret=RACING), inputs(case), capsys)


def test_a_race_would_be_seen_in_the_backward(capsys, monkeypatch):
    """Without waiting for dq the next tile lands on one that is on its way back."""
    monkeypatch.setattr(backward_call.Traffic, "gone", lambda self, slot: None)
    case = RACES[0][0]
    assert races(make(case.spec, held=1, interpret=RACING), inputs(case), capsys)


class Even(Mask):
    """A mask that is no interval."""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "cpu"}, "tpu is for tpu, found cpu"),
        ({"platform": "gpu"}, "tpu is for tpu, found gpu"),
        ({"dtype": "float64"}, "tpu computes bfloat16, float32, float16, found float64"),
        ({"H": 513}, "tpu has head widths up to 512, found 513 and 64"),
        ({"value_width": 513}, "tpu has head widths up to 512, found 64 and 513"),
        ({"spec": Spec(Causal() & Even())}, "tpu serves masks that have `bounds`, found <"),
        ({"spec": Spec(bias=alibi(4))}, "tpu has no bias"),
        ({"spec": Spec(dropout=0.1)}, "tpu has no dropout"),
    ],
)
def test_why_it_cannot_serve(change, reason):
    request = REQUEST._replace(**change)
    assert tpu(request.spec).unsupported(request).startswith(reason)
    with pytest.raises(ValueError, match="tpu: ") as told:
        make_kernel("tpu", request)
    assert reason in str(told.value)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_cases_that_it_refuses(case):
    reason = tpu(case.spec).unsupported(REQUEST._replace(spec=case.spec))
    assert reason == ("tpu has no dropout" if case.bias is None else "tpu has no bias")


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_cases_that_it_serves(case):
    assert tpu(case.spec).unsupported(REQUEST._replace(spec=case.spec, H=case.H)) is None


def test_in_an_interpreter_it_serves_on_any_platform():
    request = REQUEST._replace(platform="cpu")
    assert tpu(Spec(), interpret=True).unsupported(request) is None
    assert "float64" in tpu(Spec(), interpret=True).unsupported(request._replace(dtype="float64"))


RING = {
    "causal": Case("", B=1, T=960, N=2, K=1),
    "packed": Case("", B=2, T=480, N=2, K=1, documents=(190, 7, 250)),
    "window": Case("", B=1, T=320, N=1, K=1, mask=Causal() & Window(100), sinks=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "layout"),
    [("causal", 4, "zigzag"), ("packed", 2, "zigzag"), ("window", 2, "contiguous")],
)
def test_in_a_ring(name, devices, layout):
    """Hops continue from each other's Partial and Grads; some meet no key.

    In the plain interpreter: that of TPUs has its devices wait for each other, on threads that XLA needs.
    """
    case = RING[name]
    x, order = inputs(case), LAYOUTS[layout](case.T, devices)
    run = jitted(over("ring", devices, make(case.spec, interpret=True)))
    found = put_back(run(*laid_out(x, order, order)), order, order)
    check(found, truth_of(case))


def test_what_is_put_in_the_place_of_something_else_is_that_itself():
    """Arrays of two shapes, in the order in which they came."""
    rng = np.random.default_rng(0)
    fresh, old = (
        [
            jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
            for shape in ((1, 2, 64, 128), (64, 128))
        ]
        for _ in range(2)
    )
    done = put(fresh, old, jnp.zeros((2, 3)), interpret=True)
    for one, wanted in zip(done, fresh, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(wanted))
