"""The command line: its arguments, and the exit code for what came of them.

Everything that is wrong is told before anything heavy is imported and before a device is touched.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ringflash
from ringflash import checks, cluster, config_file, exits, processes, startup
from ringflash.bench import options as bench_options
from ringflash.config import Config, MeshConfig, flat, origins, override, resolve, with_origins
from ringflash.exits import ConfigFault, Stop
from ringflash.launch import options as launch_options
from ringflash.observe.table import table
from ringflash.plan import options as plan_options
from ringflash.plan import step_options

USAGE = "ringflash VERB --config=FILE.py[:ARG] --workdir=DIR [--config.KEY=VALUE ...]"
VERBS = {
    "train": "Train, or go on from what the workdir holds; ends with an evaluation.",
    "eval": "Evaluate the newest checkpoint of the workdir on held-out documents.",
    "check": "Compute one batch in many ways (mesh, strategy, layout, ...) that must agree.",
    "show-config": "Print every value of the configuration and where it comes from.",
}
TOOLS = {
    "bench": "Time attention beside that of others; takes no configuration.",
    "plan": "Tell whether a configuration fits a slice that is not there, and how fast it would be.",
    "launch": "Write the files that start a run on GKE, SLURM, TPU VMs, by XPK or here.",
}
TOOL_HELP = {
    "bench": bench_options.HELP,
    "plan": f"{step_options.HELP}\n{plan_options.HELP}",
    "launch": launch_options.HELP,
}
ALIKE_SECONDS = 20.0  # within which all processes of a run stop for the same reason
LAST_SECONDS = 300.0  # within which all are done where one is
NO_WORKDIR = ("check", "show-config")
HELP = f"""usage: {USAGE}

{chr(10).join(f"  {verb:<12} {what}" for verb, what in {**VERBS, **TOOLS}.items())}

  --config=FILE.py[:ARG]  the configuration; ARG is handed to its get_config()
  --workdir=DIR           where the run keeps its files (not for check and show-config)
  --config.KEY=VALUE      change one value, such as --config.steps=200
  --version, --help

Exit codes: 0 done; 1 check failed; 3 wrong configuration or arguments; 4 data broken or at its end;
5 diverged; 42 preempted and saved: start the same command again.
"""
VERB_HELP = {
    "train": """Writes config.json, metrics.jsonl, tensorboard/ and checkpoints/ into DIR.
The same command goes on where it was; Ctrl-C or SIGTERM saves and exits with 42.""",
    "eval": "Writes its results into DIR/eval/.",
    "check": """Needs no --workdir. Prints how far loss and gradients of each way are from the
config's own, and probes for leaks between documents; exits with 1 if a way is too far.
--steps=10 compares the losses of that many steps of training instead.""",
    "show-config": "Needs no --workdir. The comments in configs/base.py say what each key means.",
}


@dataclass
class Command:
    """The arguments, taken apart; `faults` has what could not be."""

    verb: str = ""
    config: str = ""
    workdir: str = ""
    steps: int = 0
    overrides: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:
        print(f"ringflash {ringflash.__version__}")
        return exits.DONE
    if "--help" in arguments or "-h" in arguments:
        print(_help(arguments[0]), end="")
        return exits.DONE
    try:
        _run(arguments)
    except Stop as stop:
        _tell(stop.lines())
        _leave(stop.code, ALIKE_SECONDS)
        return stop.code
    except KeyboardInterrupt:
        _tell(["interrupted"])
        _leave(exits.INTERRUPTED, 0)
        return exits.INTERRUPTED
    except Exception as error:
        if not processes.many():
            raise
        traceback.print_exc()
        code = exits.HANG if processes.is_lost_peer(error) else exits.UNEQUAL
        _leave(code, 0)
        return code
    _leave(exits.DONE, LAST_SECONDS)
    return exits.DONE


def _leave(code: int, seconds: float) -> None:
    """End with the other processes of the run, or without them where they do not end within that time.

    Python's own way out would wait for them, and they, in a collective, for this one.
    """
    if not processes.leave(seconds):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] in TOOLS:
        _run_tool(arguments[0], _joined(arguments[1:]))
        return
    command = parse(arguments)
    file = _check(command)
    sources = origins(file, command.overrides)
    config = resolve(override(file.values, command.overrides))
    if command.verb == "show-config":
        for key, leaf in with_origins(config, sources).items():
            print(f"{key:<28} {leaf['value']!r:<14} {leaf['from']}")
        return
    if command.verb == "check":
        startup.prepare(dataclasses.replace(config, mesh=MeshConfig(-1, 1, 1, 1)))
        # Flax, optax, orbax and grain take seconds to import: only once nothing is wrong.
        from ringflash.check import check

        # As above.
        from ringflash.curve import curves

        if command.steps:
            curves(config, command.steps)
        else:
            check(config)
        return
    workdir = Path(os.path.abspath(command.workdir))
    if command.verb == "eval" and not (workdir / "checkpoints").is_dir():
        raise ConfigFault(f"--workdir={workdir}: holds no checkpoint to evaluate")
    unwritable = checks.probe_workdir(workdir)
    if unwritable:
        raise ConfigFault(unwritable)
    _start(config, workdir)
    if command.verb == "train":
        # As above.
        from ringflash.train import train

        train(config, workdir, sources=sources)
    else:
        # As above.
        from ringflash.evaluate.run import evaluate

        evaluate(config, workdir)


def _start(config: Config, workdir: Path) -> None:
    """Find the processes of the run and join them; the devices are there afterwards."""
    device = startup.platform()
    found = cluster.detect(os.environ, device)
    startup.prepare(config, found.count)
    roll = processes.join(found, processes.hello(flat(config), workdir), device)
    if not roll:
        return
    title = f"{found.count} processes, found by {found.launcher}"
    table(title, processes.hosts(roll), header=processes.COLUMNS)
    blind = [f"rank {at} ({roll[at].host})" for at in processes.blind(workdir)]
    if blind:
        raise ConfigFault(
            f"--workdir={workdir}: {', '.join(blind)} does not see what rank 0 writes there: wanted a"
            " folder that all hosts share"
        )


def _run_tool(name: str, arguments: Sequence[str]) -> None:
    if name == "plan":
        # Nothing else needs it.
        from ringflash.plan.run import run
    elif name == "launch":
        # As above.
        from ringflash.launch.render import run
    else:
        # As above.
        from ringflash.bench.run import run

    run(arguments, table)


def _check(command: Command) -> config_file.ConfigFile:
    """The config file, if nothing is wrong with it and the arguments; else all that is wrong."""
    faults = list(command.faults)
    file = None
    if command.config:
        try:
            file = config_file.read(command.config)
        except ConfigFault as fault:
            faults += fault.lines()
    if file is None:
        faults += checks.override_faults(command.overrides, path="command line")
    else:
        faults += checks.faults(
            file.values,
            path=file.path,
            overrides=command.overrides,
            # To show a configuration no device is needed: it may be one for a slice.
            platform="tpu" if command.verb == "show-config" else startup.platform(),
        )
    if command.workdir and command.verb not in NO_WORKDIR:
        faults += filter(None, [checks.workdir_fault(command.workdir)])
    if faults or file is None:
        raise ConfigFault(*faults)
    return file


def parse(arguments: Sequence[str]) -> Command:
    """Take the arguments apart. A flag given twice counts as given last."""
    command = Command()
    rest = list(arguments)
    if rest and not rest[0].startswith("-"):
        command.verb = rest.pop(0)
    if command.verb not in VERBS:
        command.faults.append(_verb_fault(command.verb))
    for argument in _joined(rest):
        _take(argument, command)
    if not command.config:
        command.faults.append("--config is missing: wanted --config=FILE.py")
    if not command.workdir and command.verb not in NO_WORKDIR:
        command.faults.append("--workdir is missing: wanted --workdir=DIR")
    return command


def _joined(arguments: Sequence[str]) -> list[str]:
    """`--flag value` as `--flag=value`, and one dash as two."""
    joined: list[str] = []
    waiting = False
    for argument in arguments:
        if waiting and not argument.startswith("--"):
            joined[-1] += f"={argument}"
            waiting = False
            continue
        is_flag = argument.startswith("-")
        joined.append(f"--{argument.lstrip('-')}" if is_flag else argument)
        waiting = is_flag and "=" not in argument
    return joined


def _take(argument: str, command: Command) -> None:
    name, equals, value = argument.partition("=")
    if not argument.startswith("--"):
        command.faults.append(f"{argument}: left over{_meant(argument)}")
    elif name.startswith("--config."):
        if equals:
            command.overrides.append(argument)
        else:
            command.faults.append(f"{argument} has no value: wanted {argument}=VALUE")
    elif name == "--config":
        command.config = value
    elif name == "--workdir":
        command.workdir = value
    elif name == "--steps" and command.verb == "check":
        if value.isascii() and value.isdecimal() and int(value) > 0:
            command.steps = int(value)
        else:
            command.faults.append(f"{argument}: wanted whole numbers above 0, found {value!r}")
    else:
        command.faults.append(f"{name}: unknown flag{_meant(argument)}")


def _meant(argument: str) -> str:
    """What a left-over argument was perhaps meant to be."""
    name, equals, value = argument.lstrip("-").partition("=")
    if name.startswith("config.") or name in ("config", "workdir"):
        return f": did you mean --{name}{equals}{value}?"
    if name in checks.LEAVES:
        return f": did you mean --config.{name}{equals}{value}?"
    near = difflib.get_close_matches(name, ["config", "workdir", "help", "version"], n=1)
    return f": did you mean --{near[0]}{equals}{value}?" if near else f": wanted {USAGE}"


def _verb_fault(verb: str) -> str:
    if not verb:
        return f"no verb: wanted one of {', '.join({**VERBS, **TOOLS})}, as in {USAGE}"
    known = [*VERBS, *TOOLS]
    return f"{verb}: unknown verb; nearest: {checks.nearest(verb, known)}; all: {', '.join(known)}"


def _help(verb: str) -> str:
    if verb in TOOLS:
        return TOOL_HELP[verb]
    if verb not in VERBS:
        return HELP
    usage = USAGE.replace("VERB", verb)
    if verb in NO_WORKDIR:
        usage = usage.replace(" --workdir=DIR", "")
    return f"usage: {usage}\n\n{VERBS[verb]}\n{VERB_HELP[verb]}\n"


def _tell(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"ringflash: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
