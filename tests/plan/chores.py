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
