"""What the TPU compiler says, with no TPU at hand: it runs in a child process and is only ever read.

Two readings: `schedule`, of one kernel's instructions; `program`, of what a whole program does between
devices. `run` is the verb `plan`: it compiles attention for a slice (`attention`) and estimates its time
(`estimate`).
"""
