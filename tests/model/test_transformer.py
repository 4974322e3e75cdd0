import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import CONFIG, config, decoder, hidden, tree
from flax import nnx

from ringflash.attention import Causal, Kernel, Segments, Spec, Tokens, differentiable
from ringflash.attention.kernels.reference import reference
from ringflash.model.presets import REMAT
from ringflash.model.transformer import POLICIES, Decoder


def shapes(model):
    found = jax.tree_util.tree_leaves_with_path(tree(model))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in found
    }


def test_the_parameters_by_name_and_shape():
    block = {
        "attention.q_DNH": (16, 4, 6),
        "attention.k_DKH": (16, 2, 6),
        "attention.v_DKH": (16, 2, 6),
        "attention.out_NHD": (4, 6, 16),
        "attention_norm.scale_D": (16,),
        "mlp.gate_DF": (16, 24),
        "mlp.up_DF": (16, 24),
        "mlp.down_FD": (24, 16),
        "mlp_norm.scale_D": (16,),
    }
    wanted = {f"blocks.{name}": (3, *shape) for name, shape in block.items()}
    wanted |= {"embedding_VD": (19, 16), "norm.scale_D": (16,)}
    assert shapes(decoder()) == wanted
    assert shapes(decoder(config(tied_embeddings=False))) == wanted | {"unembedding_DV": (16, 19)}


def test_layers_are_drawn_apart_and_the_depth_scales_what_adds_to_the_stream():
    blocks = tree(decoder(config(layers=8, width=64)))["blocks"]
    q = blocks["attention"]["q_DNH"]
    assert not np.array_equal(q[0], q[1])
    assert float(q.std()) == pytest.approx(64**-0.5, rel=0.05)
    down = blocks["mlp"]["down_FD"]
    assert float(down.std()) == pytest.approx((24 * 2 * 8) ** -0.5, rel=0.05)


@pytest.mark.parametrize("remat", REMAT)
def test_the_parameters_do_not_depend_on_kernel_or_remat(remat):
    found = tree(decoder(config(remat=remat, dtype="bfloat16"), kernel="chunked"))
    wanted = tree(decoder())
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_tied_output_is_the_embedding_transposed():
    model = decoder()
    np.testing.assert_array_equal(model.unembedding(), model.embedding_VD[...].T)
    model = decoder(config(tied_embeddings=False))
    assert model.unembedding() is model.unembedding_DV[...]


def row(*documents, pad=0):
    """tokens, positions and segment ids of one row, [1, T]."""
    segments = [np.full(len(d), n) for n, d in enumerate(documents)] + [np.full(pad, -1)]
    positions = [np.arange(len(d)) for d in documents] + [np.zeros(pad, int)]
    tokens = [np.asarray(d) for d in documents] + [np.zeros(pad, int)]
    return [np.concatenate(parts)[None] for parts in (tokens, positions, segments)]


DRAW = np.random.default_rng(0)
FIRST, SECOND, OTHER = (DRAW.integers(0, 19, n) for n in (7, 6, 7))


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_documents_of_a_row_do_not_see_each_other(kernel):
    model = decoder(kernel=kernel)
    both = hidden(model, *row(FIRST, SECOND, pad=3))
    changed = hidden(model, *row(OTHER, SECOND, pad=3))
    np.testing.assert_array_equal(both[:, 7:13], changed[:, 7:13])
    assert np.abs(both[:, :7] - changed[:, :7]).max() > 0.1
    # A document is the same wherever it lies: positions count from its start.
    alone = hidden(model, *row(SECOND))
    np.testing.assert_allclose(both[:, 7:13], alone, rtol=1e-4, atol=1e-5)
    assert np.isfinite(both).all()


def test_no_token_sees_the_future():
    model, later = decoder(), FIRST.copy()
    later[4] = (later[4] + 1) % 19
    now, then = hidden(model, *row(FIRST)), hidden(model, *row(later))
    np.testing.assert_array_equal(now[:, :4], then[:, :4])
    moved = np.abs(now - then).max((0, 2))
    assert (moved[4:] > 1e-3).all(), "every later token sees it"


def test_the_order_of_the_slots_does_not_matter():
    """Positions travel with the tokens: a layout changes where a state lies, and nothing else."""
    order = np.random.default_rng(1).permutation(13)
    straight = row(FIRST, SECOND)
    moved = hidden(decoder(), *(a[:, order] for a in straight))
    wanted = hidden(decoder(), *straight)[:, order]
    np.testing.assert_allclose(moved, wanted, rtol=1e-4, atol=1e-5)


def counted_gradients(remat):
    """Gradients of a decoder whose kernel counts its runs, and the counts of the two passes."""
    runs = {"forward": 0, "backward": 0}
    true = reference(Spec(Causal() & Segments()))

    def count(name, x):
        def told(x):
            runs[name] += 1
            return x

        return jax.pure_callback(told, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def forward(*args, **kwargs):
        partial = true.forward(*args, **kwargs)
        return partial._replace(out_BTNH=count("forward", partial.out_BTNH))

    def backward(*args, **kwargs):
        grads = true.backward(*args, **kwargs)
        return grads._replace(dq_BTNH=count("backward", grads.dq_BTNH))

    kernel = differentiable(Kernel("counted", true.spec, forward, backward))

    def attention(q, k, v, positions, segments):
        at = Tokens(positions, segments)
        return kernel(q, k, v, at, at)[0]

    graph, params = nnx.split(Decoder(config(remat=remat), attention, nnx.Rngs(0)))
    rows = [jnp.asarray(a, jnp.int32) for a in row(FIRST, SECOND)]
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(1, 13, 16)), jnp.float32)

    @jax.jit
    def gradients(params):
        return jax.grad(lambda p: (nnx.merge(graph, p)(*rows) * weights).sum())(params)

    grads = jax.block_until_ready(gradients(params))
    return grads, runs["forward"], runs["backward"]


@pytest.mark.parametrize(
    ("remat", "forwards"), [("none", 3), ("attention", 3), ("offload", 3), ("full", 6)]
)
def test_remat_changes_no_gradient_and_attention_is_run_again_only_if_full(remat, forwards):
    """Of three layers: to run the kernel again is to send K and V round the ring again."""
    assert tuple(POLICIES) == REMAT
    grads, forward_runs, backward_runs = counted_gradients(remat)
    assert (forward_runs, backward_runs) == (forwards, 3)
    wanted, _, _ = counted_gradients("none")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), grads, wanted)


def test_gradients_of_the_embedding_are_added_up_in_fp32():
    """1,024 times one token: in bfloat16 a sum stands still once it is 256 times its parts."""
    tokens = jnp.zeros((256, 4), jnp.int32)
    rows = (tokens, jnp.broadcast_to(jnp.arange(4), tokens.shape), tokens)

    def gradient(dtype):
        graph, params = nnx.split(decoder(config(dtype=dtype, layers=1)))

        def total(params):
            return nnx.merge(graph, params)(*rows).astype(jnp.float32)[..., 0].sum()

        return np.asarray(jax.jit(jax.grad(total))(params)["embedding_VD"][...][0])

    exact, low = gradient("float32"), gradient("bfloat16")
    assert np.abs(low - exact).max() < 0.02 * np.abs(exact).max()


def test_the_states_are_normalised_and_in_the_compute_dtype():
    model = decoder(config(dtype="bfloat16"))
    graph, params = nnx.split(model)
    states = nnx.merge(graph, params)(*(jnp.asarray(a, jnp.int32) for a in row(FIRST)))
    assert states.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.square(np.float32(states)).mean(-1), 1, rtol=0.02)
    assert CONFIG.param_dtype == "float32"
    assert {leaf.dtype for leaf in jax.tree.leaves(tree(model))} == {jnp.dtype("float32")}


def test_with_qk_norm_the_size_of_queries_and_keys_does_not_matter():
    """Those of every head are normed: scaled weights give the same states, but for epsilon."""
    model = decoder(config(qk_norm=True))
    wanted = hidden(model, *row(FIRST))
    for weight in (model.blocks.attention.q_DNH, model.blocks.attention.k_DKH):
        weight[...] = 3 * weight[...]
    np.testing.assert_allclose(hidden(model, *row(FIRST)), wanted, rtol=1e-3, atol=1e-3)
    model.blocks.attention.q_scale_H[...] = 3 * model.blocks.attention.q_scale_H[...]
    assert np.abs(hidden(model, *row(FIRST)) - wanted).max() > 1e-2
