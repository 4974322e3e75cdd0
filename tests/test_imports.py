"""Imports point down, never sideways and never in a loop; a late one says why."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ringflash"
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}

# Which component a module belongs to, where that is not the first name below `ringflash`.
COMPONENTS = {
    "ringflash": "version",
    "ringflash.model.presets": "presets",
    "ringflash.config_file": "config",
    "ringflash.stages": "config",
    "ringflash.rules": "checks",
    "ringflash.combinations": "checks",
    "ringflash.schedule": "optimizer",
    "ringflash.evaluate.run": "eval",
    "ringflash.ring_order": "torus",
    "ringflash.build": "assemble",
    "ringflash.legs": "assemble",
    "ringflash.curve": "check",
    "ringflash.rollcall": "processes",
    "ringflash.cluster": "processes",
    "ringflash.hostlists": "processes",
    "ringflash.machine": "processes",
    "ringflash.logits": "loss",
    "ringflash.plan.attention": "planning",
    "ringflash.plan.options": "planning",
    "ringflash.plan.rows": "planning",
    "ringflash.plan.step": "planning",
    "ringflash.plan.step_options": "planning",
    "ringflash.plan.step_rows": "planning",
    "ringflash.plan.step_run": "planning",
    "ringflash.plan.step_guess": "planning",
    "ringflash.plan.step_search": "planning",
    "ringflash.plan.step_time": "planning",
    "ringflash.plan.run": "planning",
}
# A component imports itself and what stands lower. What is not named here is an ordinary one.
LEVELS = {
    "version": 0,
    "attention": 0,
    "presets": 0,
    "exits": 0,
    "leaves": 0,
    "integrity": 0,
    "config": 1,
    "shards": 1,
    "torus": 1,
    "processes": 1,
    "checks": 3,
    "assemble": 3,
    "bench": 3,
    "planning": 4,
    "check": 4,
    "run": 4,
    "supervisor": 4,
    "launch": 5,
    "train": 5,
    "eval": 6,
    "cli": 7,
}
ORDINARY = 2


def component(module: str) -> str:
    return COMPONENTS.get(module) or module.split(".")[1]


def level(module: str) -> int:
    return LEVELS.get(component(module), ORDINARY)


def imports(file: Path) -> set[str]:
    """The modules of ours that a file names in its imports, wherever in the file they stand."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: wanted an absolute import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return {module for module in found if module in FILES}


GRAPH = {module: imports(file) for module, file in FILES.items()}


def points_down(module: str, target: str) -> bool:
    return component(target) == component(module) or level(target) < level(module)


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module):
    up = {target for target in GRAPH[module] if not points_down(module, target)}
    assert not up, f"{module} imports {up}: sideways or up"


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("ringflash.loss", "ringflash.mesh"),
        ("ringflash.evaluate.report", "ringflash.observe.table"),
        ("ringflash.data.batch", "ringflash.mesh"),
        ("ringflash.step", "ringflash.assemble"),
        ("ringflash.config", "ringflash.checks"),
        ("ringflash.attention.attend", "ringflash.config"),
        ("ringflash.assemble", "ringflash.run"),
        ("ringflash.run", "ringflash.train"),
        ("ringflash.evaluate.perplexity", "ringflash.evaluate.run"),
        ("ringflash.train", "ringflash.cli"),
    ],
)
def test_an_arrow_that_would_be_wrong(module, target):
    assert {module, target} <= FILES.keys()
    assert not points_down(module, target)


def test_every_name_here_is_of_something():
    assert COMPONENTS.keys() <= FILES.keys()
    assert LEVELS.keys() <= {component(module) for module in FILES}


def test_attention_imports_nothing_else_of_ours():
    targets = set().union(*(GRAPH[m] for m in FILES if component(m) == "attention"))
    assert targets
    assert {component(target) for target in targets} == {"attention"}


def test_there_is_no_import_loop():
    left = dict(GRAPH)
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"these import one another in a loop, or stand on one: {sorted(left)}"


@pytest.mark.parametrize("module", FILES)
def test_a_late_import_says_why(module):
    lines = FILES[module].read_text().splitlines()
    for function in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                place = f"{FILES[module]}:{node.lineno}"
                above = lines[node.lineno - 2].strip()
                assert above.startswith("#"), f"{place}: wanted a comment above that says why"


def test_every_folder_is_a_package():
    folders = {file.parent for file in FILES.values()}
    without = {str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()}
    assert not without, f"setuptools leaves out folders that have no __init__.py: {without}"
