"""What the tests have a child do."""

import os
import signal
import sys
import time


def echo(argument, dump):
    return {"argument": argument, "dump": str(dump), "there": dump.is_dir()}


def settings(names, dump):
    return {name: os.environ.get(name) for name in names}


def fail(argument, dump):
    raise ValueError(argument)


def die(argument, dump):
    print("out of registers", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGABRT)


def sleep(note, dump):
    with open(note, "w") as file:
        file.write(f"{os.getpid()} {dump.parent}")
    time.sleep(60)


def compiled_by_a_run(asked, dump):
    """Bytes on one device of the program that a run of this configuration makes its steps with."""
    from ringflash import config as configs
    from ringflash import startup
    from ringflash.assemble import assemble
    from ringflash.plan.step import found_devices
    from ringflash.plan.where import Where

    config, where = configs.from_json(asked[0]), Where(asked[1])
    os.environ["RINGFLASH_CACHE_DIR"] = str(dump / "cache")
    startup.prepare(config)
    leg = assemble(config, None if where.simulated else found_devices(where)).own
    used = leg.compile().memory_analysis()
    own = used.output_size_in_bytes - used.alias_size_in_bytes
    return {
        "arguments": used.argument_size_in_bytes,
        "total": used.argument_size_in_bytes + own + used.temp_size_in_bytes,
        "code": used.generated_code_size_in_bytes,
    }
