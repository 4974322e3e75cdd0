"""Every leaf of a configuration, with its meaning, unit, allowed values and a general default.

Other files start from this one and change leaves:

    from base import get_config as base

    def get_config():
        config = base()
        config.steps = 200
        return config

`ringflash show-config --config=FILE.py` prints each value and where it comes from.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    # Not type_safe: a wrong type is told by the checks, together with all other faults.
    config = ConfigDict(type_safe=False)
    config.seed = 0  # of parameters and data order; 0 to 2147483647
    config.steps = 1000  # optimizer steps of the whole run, earlier starts included; at least 1
    config.seq_len = 32768  # tokens in a sequence, over all shards; see attention.layout
    config.stages = ""  # earlier stages: "until=100 seq_len=8192 context=2 theta=1e4; ..."
    config.global_batch_size = 8  # sequences in a step; a multiple of data * fsdp * accumulation
    config.accumulation = 1  # parts in which a step's sequences are worked on, one after another
    config.max_skipped = 3  # steps in a row left out, not finite or a spike; one more: exit 5
    config.skip_norm = 0.0  # unclipped gradient's norm above which a step is a spike; 0: no limit
    config.log_every = 10  # steps between two logged lines; at least 1
    config.cpu_devices = 8  # devices to simulate where there are only CPUs; 1 to 4096

    config.model = ConfigDict(type_safe=False)
    config.model.preset = "small"  # named sizes: a key of ringflash.model.presets.PRESETS
    config.model.vocab_size = 0  # rows of the embedding; 0: the preset's; at least the tokenizer's
    config.model.layers = 0  # decoder blocks; 0: the preset's
    config.model.width = 0  # of the residual stream, D; 0: the preset's
    config.model.mlp_width = 0  # of the SwiGLU hidden layer, F; 0: the preset's
    config.model.heads = 0  # query heads, N; 0: the preset's; a multiple of kv_heads
    config.model.kv_heads = 0  # key/value heads, K; 0: the preset's; a multiple of mesh.tensor
    config.model.head_dim = 0  # width of one head, H; 0: the preset's; even, for RoPE
    config.model.rope_theta = 0.0  # RoPE's base wavelength, in positions; 0: the preset's
    config.model.norm_eps = 0.0  # added to the mean square in RMSNorm; 0: the preset's
    config.model.tied_embeddings = True  # output projection is the embedding transposed; a bool
    config.model.dtype = "bfloat16"  # of activations and matmuls: float32 or bfloat16
    config.model.param_dtype = "float32"  # of parameters and optimizer state: float32 or bfloat16
    config.model.remat = "none"  # kept of a layer: none is recomputed, attention, offload, full
    config.model.qk_norm = False  # normalise queries and keys of each head before RoPE; a bool
    config.model.mlp_chunk = 0  # tokens of a shard that are in the MLP at one time; 0: all
    config.model.matmul = "plain"  # of blocks' products with weights: plain is in dtype; int8, fp8

    config.attention = ConfigDict(type_safe=False)
    config.attention.kernel = "auto"  # runs on one shard: auto, or a key of dispatch.KERNELS
    config.attention.strategy = "ring"  # how shards meet: dispatch.STRATEGIES, a*b, or auto
    config.attention.layout = "zigzag"  # tokens over shards: dispatch.LAYOUTS or ROW_LAYOUTS

    config.mesh = ConfigDict(type_safe=False)
    config.mesh.data = 1  # devices that share the batch and copy the model; at least 1, or -1
    config.mesh.fsdp = 1  # devices that share the batch and the parameters; at least 1, or -1
    config.mesh.context = -1  # devices that share a sequence; at least 1; -1: all that are left
    config.mesh.tensor = 1  # devices that share heads and MLP width; at least 1, or -1

    config.data = ConfigDict(type_safe=False)
    config.data.source = "stdlib"  # documents: stdlib, or files:GLOB with ** allowed
    config.data.tokenizer = "byte"  # documents to ids: a key of data.tokenizers.TOKENIZERS
    config.data.held_out_percent = 5  # of the documents, chosen by name, for evaluation; 1 to 99
    config.data.epochs = 0  # passes over the training documents before data ends; 0: no end

    config.optimizer = ConfigDict(type_safe=False)
    config.optimizer.name = "adamw"  # adamw; or muon, for the matrices of blocks alone
    config.optimizer.schedule = "cosine"  # after the warm-up: cosine, linear, wsd or constant
    config.optimizer.learning_rate = 3e-4  # at the peak; above 0
    config.optimizer.warmup_steps = 100  # steps of linear rise to the peak; at least 0
    config.optimizer.decay_start = 800  # step at which wsd leaves the peak; warmup_steps or later
    config.optimizer.decay_steps = 1000  # step at which the decay ends; above warmup_steps
    config.optimizer.final_fraction = 0.1  # of the peak, from decay_steps on; 0 to 1
    config.optimizer.weight_decay = 0.1  # per step and learning rate, not of norms; at least 0
    config.optimizer.beta1 = 0.9  # AdamW's decay of the mean gradient; 0 to below 1
    config.optimizer.beta2 = 0.95  # AdamW's decay of the mean squared gradient; 0 to below 1
    config.optimizer.momentum = 0.95  # Muon's decay of the mean gradient; 0 to below 1
    config.optimizer.clip_norm = 1.0  # the gradient's global norm is clipped to this; above 0
    config.optimizer.offload = False  # its state lies in the hosts' memory between steps; a bool
    config.optimizer.ema_decay = 0.0  # of an average of the parameters, then evaluated; 0: none

    config.loss = ConfigDict(type_safe=False)
    config.loss.chunk = 1024  # tokens of a shard whose logits exist at one time; at least 1
    config.loss.vocab_chunk = 8192  # columns of a device whose logits exist at one time; at least 1
    config.loss.z_loss = 0.0  # times (ln Z)^2 of each target is added in training; at least 0

    config.checkpoint = ConfigDict(type_safe=False)
    config.checkpoint.every = 100  # steps between two checkpoints; 0: only at the end
    config.checkpoint.keep = 3  # newest checkpoints that stay; at least 1

    config.eval = ConfigDict(type_safe=False)
    config.eval.every = 0  # steps between two evaluations; 0: only at the end
    config.eval.documents = 32  # longest held-out documents to evaluate on; at least 1
    return config
