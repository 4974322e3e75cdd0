"""What the tests of the mesh have a child with the TPU compiler do."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.config import MeshConfig
from ringflash.mesh import make_mesh
from ringflash.ring_order import ring_hops


def rings(asked, dump):
    """The longest hop of the ring over each slice, and how many transfers a program of two has."""
    meshes = {f"{name} x {slices}": ring(name, slices) for name, slices in asked["topologies"]}
    return {
        "hops": {name: ring_hops(mesh) for name, mesh in meshes.items()},
        "transfers": {name: transfers(ring(name, 1)) for name in asked["compile"]},
    }


def ring(name, slices):
    """A mesh of one ring for each slice."""
    # Loads the compiler: never in the parent.
    from jax.experimental import topologies

    many = {"num_slices": slices} if slices > 1 else {}
    described = topologies.get_topology_desc(platform="tpu", topology_name=name, **many)
    return make_mesh(MeshConfig(slices, 1, -1, 1), described.devices)


def transfers(mesh):
    """Those of the compiled program that sends one half of an array each way round."""
    size = mesh.shape["context"]
    onward = [(at, (at + 1) % size) for at in range(size)]

    def both_ways(x_TD):
        first, second = jnp.split(x_TD, 2)
        back = [(to, at) for at, to in onward]
        return jax.lax.ppermute(first, "context", onward), jax.lax.ppermute(second, "context", back)

    spread = P("context")
    run = jax.jit(jax.shard_map(both_ways, mesh=mesh, in_specs=spread, out_specs=spread))
    x_TD = jax.ShapeDtypeStruct(
        (size * 1024, 128), jnp.bfloat16, sharding=NamedSharding(mesh, spread)
    )
    return run.lower(x_TD).compile().as_text().count("collective-permute-start(")
