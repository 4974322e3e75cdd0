"""How long a step would take, from figures alone: by this a search puts configurations in order.

Attention is that of `forecast`; the other products go at a fixed part of the matrix units' peak; what
`tensor` exchanges goes over the links. Nothing is compiled, and memory is not looked at: it is the order that
counts.
"""

from __future__ import annotations

from ringflash.attention import LAYOUTS, Causal
from ringflash.config import Config
from ringflash.flops import matmul_parameters
from ringflash.plan import links
from ringflash.plan.forecast import Job, choose, forecast
from ringflash.plan.generations import Generation

REACHED = (
    0.75  # of the peak by products of matrices, as the compiler estimates those of an 8B model
)
FORWARDS = {
    "none": 3,
    "attention": 4,
    "offload": 4,
    "full": 4,
}  # of the blocks' products; a backward is 2


def job_of(config: Config, mesh: dict[str, int], generation: Generation, hop_links: int) -> Job:
    """Attention of a layer, as one device has it."""
    model, layout = config.model, config.attention.layout
    # One that depends on the data is about as even as these two are.
    near = "striped" if config.seq_len % (2 * mesh["context"]) else "zigzag"
    parts = mesh["data"] * mesh["fsdp"] * config.accumulation
    return Job(
        generation=generation.name,
        shape=(mesh["context"],),
        shards=mesh["context"],
        hop_links=max(1, hop_links),
        mask=Causal(),
        layout=layout if layout in LAYOUTS else near,
        seq_len=config.seq_len,
        rows=config.global_batch_size // parts,
        heads=model.heads // mesh["tensor"],
        kv_heads=model.kv_heads // mesh["tensor"],
        head_dim=model.head_dim,
    )


def guess(config: Config, mesh: dict[str, int], generation: Generation) -> float:
    """Seconds of a step. Raises ValueError for a strategy that cannot share the heads out."""
    model, devices = config.model, 1
    for size in mesh.values():
        devices *= size
    job, times = job_of(config, mesh, generation, 1), model.layers * config.accumulation
    strategy = config.attention.strategy
    found = choose(job)[0][0] if strategy == "auto" else forecast(job, strategy)
    forwards = 2 if model.remat == "full" else 1
    attention = forwards * found.forward.total_seconds + found.backward.total_seconds
    tokens = config.seq_len * config.global_batch_size / devices
    flops = 2 * matmul_parameters(model) * tokens * FORWARDS[model.remat]
    exchanged = 0.0
    if mesh["tensor"] > 1:  # each block gathers and sums what goes in and out, twice, both ways
        held = 2 * model.width * tokens * mesh["tensor"]
        ways = 4 * FORWARDS[model.remat] / 3 * model.layers
        exchanged = ways * links.gather_seconds(generation.name, held, (mesh["tensor"],))
    return times * attention + flops / (REACHED * generation.peak_flops) + exchanged
