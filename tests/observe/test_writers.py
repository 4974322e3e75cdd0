import json
import math
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event

from ringflash.observe.writers import fan_out, jsonl, tensorboard


def lines_of(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def history(path):
    return [(line["step"], line["train/loss"]) for line in lines_of(path)]


def write_steps(path, *steps, resume_step=None, run=1.0):
    writer = jsonl(path, resume_step=resume_step)
    for step in steps:
        writer.write(step, {"train/loss": run})
    writer.close()


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    writer = jsonl(tmp_path / "run" / "metrics.jsonl")
    writer.write(3, {"train/loss": 2.5, "perf/mfu": 0.25})
    (line,) = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert line.pop("time") > 1e9
    assert line == {"step": 3, "train/loss": 2.5, "perf/mfu": 0.25}
    writer.close()


def test_numbers_that_json_has_not_are_null_and_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = jsonl(path)
    writer.write(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    writer.close()
    (line,) = lines_of(path)
    assert (line["a"], line["b"], line["c"]) == (None, None, 1.0)
    assert line["non_finite"] == {"a": "nan", "b": "-inf"}


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, 3, 4)
    write_steps(path, 3, 4, 5, resume_step=2, run=2.0)
    assert history(path) == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", ['{"step": 3, "tra', '{"step": 3, "train/loss": 9.0}'])
def test_without_a_step_everything_is_kept_but_a_line_cut_short(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2)
    with path.open("a") as file:
        file.write(cut)
    write_steps(path, 3)
    assert history(path) == [(1, 1.0), (2, 1.0), (3, 1.0)]


def events_of(directory):
    """The events of every file; each record is a length, 4 bytes, the content, 4 bytes."""
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def scalars_of(directory):
    return [
        (event.step, value.tag, value.simple_value)
        for event in events_of(directory)
        for value in event.summary.value
    ]


def test_tensorboard_events_are_there_after_closing(tmp_path):
    writer = tensorboard(tmp_path)
    writer.write(7, {"train/loss": 2.5, "perf/mfu": 0.25})
    writer.write(8, {"train/loss": math.nan})
    writer.close()
    *finite, (step, name, value) = scalars_of(tmp_path)
    assert finite == [(7, "train/loss", 2.5), (7, "perf/mfu", 0.25)]
    assert (step, name) == (8, "train/loss")
    assert math.isnan(value)


def test_resuming_tells_tensorboard_to_purge(tmp_path):
    tensorboard(tmp_path, resume_step=4).close()
    starts = [e.step for e in events_of(tmp_path) if e.HasField("session_log")]
    assert starts == [5]


def test_fan_out_reaches_every_writer(tmp_path):
    writer = fan_out(jsonl(tmp_path / "one"), jsonl(tmp_path / "two"))
    writer.write(1, {"train/loss": 1.5})
    writer.close()
    assert history(tmp_path / "one") == history(tmp_path / "two") == [(1, 1.5)]
