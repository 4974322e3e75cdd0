"""The page on attention: its Python runs, from top to bottom, as a reader would."""

import re
from pathlib import Path

import pytest

import ringflash.attention

PAGE = Path(ringflash.attention.__file__).with_name("README.md")


@pytest.mark.slow
def test_every_block_of_python_runs():
    text = PAGE.read_text()
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(blocks) == text.count("```python") == 3
    names: dict = {}
    for block in blocks:
        first = text[: block.start(1)].count("\n")
        # With the line numbers of the page, so that a traceback points there.
        exec(compile("\n" * first + block[1], str(PAGE), "exec"), names)


def test_what_it_names_exists():
    """Files and names between backquotes that look like ours."""
    for file in re.findall(r"`(\w+\.py)`", PAGE.read_text()):
        assert list(PAGE.parent.rglob(file)), f"{file} is gone"
