"""What an evaluation found, for a person (a table) and for machines (`eval/<step>.json`)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ringflash.evaluate.perplexity import Score

POLICY = (
    "full context: one forward a document, BOS in front, every target sees all earlier tokens of its "
    "document; sums over all documents, divided once; EOS not scored"
)


def write(
    workdir: Path, step: int, scores: list[Score], documents: tuple[str, ...], fingerprint: str
) -> None:
    """`<workdir>/eval/<step>.json`: the sums, what is made of them, how, and on which documents.

    `fingerprint` says which text and length exactly: `read` goes by it.
    """
    rows = [
        dataclasses.asdict(s) | {"perplexity": s.perplexity, "bits_per_byte": s.bits_per_byte}
        for s in scores
    ]
    record = {"step": step, "policy": POLICY, "scores": rows, "documents": list(documents)}
    record["fingerprint"] = fingerprint
    folder = workdir / "eval"
    folder.mkdir(exist_ok=True)
    draft = folder / f"{step}.json.tmp"
    draft.write_text(json.dumps(record, indent=1) + "\n")
    draft.replace(folder / f"{step}.json")


def read(workdir: Path, step: int, fingerprint: str) -> list[Score] | None:
    """The scores of an earlier evaluation at that step on the same rows; None if there is none to read."""
    names = [field.name for field in dataclasses.fields(Score)]
    try:
        record = json.loads((workdir / "eval" / f"{step}.json").read_text())
        if record["fingerprint"] != fingerprint:
            return None
        return [Score(**{name: row[name] for name in names}) for row in record["scores"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget(workdir: Path, *, after: int) -> None:
    """Drop what was written at later steps: a run that goes on from `after` makes them again."""
    for path in (workdir / "eval").glob("*.json"):
        if path.stem.isdecimal() and int(path.stem) > after:
            path.unlink()


def rows(scores: list[Score], before: list[Score] | None = None) -> list[tuple[str, ...]]:
    """Table rows: positions, targets, perplexity, bits per byte; then what they were `before`."""
    then = {s.name: s for s in before or []}
    table = []
    for n, score in enumerate(scores):
        name = "all" if n == 0 else score.name
        row = [name, f"{score.targets:,}", f"{score.perplexity:.3f}", f"{score.bits_per_byte:.3f}"]
        if before is not None:
            old = before[0] if n == 0 else then.get(score.name)
            row += [f"{old.perplexity:.3f}", f"{old.bits_per_byte:.3f}"] if old else ["", ""]
        table.append(tuple(row))
    return table
