"""Dicts as YAML for a person: in the order they were written, with comments above the keys they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

WIDTH = 110


class Dumper(yaml.SafeDumper):
    """Repeats what stands twice: no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(
    objects: Sequence[Mapping[str, Any]], head: Sequence[str], comments: Mapping[str, Sequence[str]]
) -> str:
    """A file of one document for each object.

    comments: above the first line that has the key, at its indentation.
    """
    documents = [
        yaml.dump(one, Dumper=Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)
        for one in objects
    ]
    lines = [f"# {line}" for line in head]
    left = dict(comments)
    for line in "---\n".join(documents).splitlines():
        key = next((one for one in left if one in line), None)
        if key is not None:
            indent = " " * (len(line) - len(line.lstrip(" -")))
            lines += [f"{indent}# {comment}" for comment in left.pop(key)]
        lines.append(line)
    return "\n".join(lines) + "\n"
