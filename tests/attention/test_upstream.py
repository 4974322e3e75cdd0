"""What others wrote, behind our contract: splash in Pallas' interpreter, and why the rest cannot serve."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expected import check, results, truth
from jax.sharding import AxisType

from ringflash.attention import (
    LAYOUTS,
    Causal,
    Full,
    Prefix,
    Spec,
    Tokens,
    Window,
    differentiable,
    make_kernel,
)
from ringflash.attention.attend import Axes, spread
from ringflash.attention.cases import Case, inputs
from ringflash.attention.kernels.upstream import REFUSED, splash
from ringflash.attention.spec import Request
from ringflash.attention.tile import alibi

interpreted = partial(splash, interpret=True)
REQUEST = Request(1, 256, 256, 4, 2, 64, 64, "bfloat16", "tpu", Spec())


@pytest.mark.parametrize(
    "case",
    [
        Case("causal_mha", B=1, T=256, K=4),
        Case("full_mqa", B=1, T=130, K=1, mask=Full()),
        Case("prefix_softcap", T=140, mask=Prefix(50), softcap=2.0, scale=0.3, sinks=True),
        Case("packed", T=200, documents=(90, 1, 60), value_width=24),
        Case("packed_prefix", B=1, T=150, mask=Prefix(20), documents=(90, 50)),
        Case("cross", B=1, T=40, S=300, q_start=200),
        Case("nothing_to_see", B=1, T=130, documents=(5,), k_documents=()),
    ],
    ids=lambda case: case.name,
)
def test_splash_is_the_reference(case):
    x = inputs(case)
    check(results(differentiable(interpreted(case.spec)), x), truth(case.spec, x))


def test_splash_takes_positions_in_any_order():
    """Keys are sorted by what the tokens say, not by where they lie."""
    case = Case("", B=1, T=256, documents=(100, 80))
    x = inputs(case)
    order = np.random.default_rng(1).permutation(256)
    turned = x._replace(
        k_BSKH=x.k_BSKH[:, order],
        v_BSKH=x.v_BSKH[:, order],
        k_at=Tokens(*(a[:, order] for a in x.k_at[:2])),
    )
    wanted = truth(case.spec, x)
    found = results(differentiable(interpreted(case.spec)), turned)
    check(found, wanted | {name: wanted[name][:, order] for name in ("dk", "dv")})


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_splash_in_a_ring(layout):
    """Hops whose relation is only known when they run."""
    case = Case("", B=1, T=512)
    x = inputs(case)
    order = LAYOUTS[layout](case.T, 2)
    laid = x._replace(
        **{f: getattr(x, f)[:, order] for f in ("q_BTNH", "k_BSKH", "v_BSKH", "dout_BTNH")},
        dlse_BNT=x.dlse_BNT[:, :, order],
        q_at=Tokens(*(a[:, order] for a in x.q_at[:2])),
        k_at=Tokens(*(a[:, order] for a in x.k_at[:2])),
    )
    mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    kernel = spread(interpreted(case.spec), "ring", mesh, Axes((), ("context",), ()))
    check(results(differentiable(kernel), laid), truth(case.spec, laid))


def test_splash_gives_fp32_of_bf16():
    x = inputs(Case("", B=1, T=128))
    low = [jnp.asarray(a, jnp.bfloat16) for a in x[:3]]
    part = interpreted(Spec()).forward(*low, x.q_at, x.k_at)
    assert part.out_BTNH.dtype == part.lse_BNT.dtype == jnp.float32


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "cpu"}, "for tpu, found cpu"),
        ({"platform": "gpu"}, "for tpu, found gpu"),
        ({"dtype": "float64"}, "found float64"),
        ({"spec": Spec(Causal() & Window(9))}, "found Window(left=9, right=None)"),
        ({"spec": Spec(bias=alibi(4))}, "no bias"),
        ({"spec": Spec(dropout=0.1)}, "no dropout"),
    ],
)
def test_why_splash_cannot_serve(change, reason):
    request = REQUEST._replace(**change)
    assert reason in splash(request.spec).unsupported(request)
    with pytest.raises(ValueError, match="splash: ") as told:
        make_kernel("splash", request)
    assert reason in str(told.value)


def test_splash_serves_on_tpu():
    assert splash(Spec()).unsupported(REQUEST) is None
    assert make_kernel("splash", REQUEST).name == "splash"


def test_another_jax_is_a_reason(monkeypatch):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    monkeypatch.delattr(splash_attention_kernel, "_splash_attention_bwd_dq")
    assert "another splash" in splash(Spec()).unsupported(REQUEST)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_honour_the_contract_says_why(name):
    with pytest.raises(ValueError, match=f"{name} cannot serve: .*delta"):
        make_kernel(name, REQUEST._replace(platform="gpu"))


def test_auto_goes_by_platform():
    assert make_kernel("auto", REQUEST._replace(platform="cpu")).name == "chunked"
    assert make_kernel("auto", REQUEST).name == "tpu"
    biased = REQUEST._replace(spec=replace(REQUEST.spec, bias=alibi(4)))
    assert make_kernel("auto", biased).name == "chunked"
