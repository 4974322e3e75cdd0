import io

import pytest

from ringflash.observe.progress import TimeLeft, progress

METRICS = {
    "train/loss": 3.2138,
    "perf/tokens_per_second": 4096.4,
    "perf/step_seconds": 0.75,
    "train/grad_norm": 1.0,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_where_there_is_no_terminal():
    out = io.StringIO()
    shown = progress(60, 10, out)
    for step in (11, 12):
        shown.update(step, METRICS)
    shown.note("saved")
    shown.close()
    assert out.getvalue().splitlines() == [
        "step 11/60  loss 3.214  tokens/s 4,096  left 0:37",
        "step 12/60  loss 3.214  tokens/s 4,096  left 0:36",
        "saved",
    ]


def test_metrics_that_are_not_given_are_not_shown():
    out = io.StringIO()
    progress(60, 0, out).update(1, {"train/loss": 1.0})
    assert out.getvalue() == "step 1/60  loss 1.000  left ?\n"


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    shown = progress(60, 10, out)
    for step in (11, 12):
        shown.update(step, METRICS)
    shown.note("[saved]")
    shown.close()
    text = out.getvalue()
    assert "12/60" in text
    assert "loss 3.214  tokens/s 4,096  left 0:36" in text
    assert "[saved]" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


def seconds_of(seconds):
    return {"perf/step_seconds": seconds}


def test_time_left_counts_steps_alone_and_shrugs_off_a_slow_one():
    left = TimeLeft(100)
    assert left.after(0, {}) is None
    assert left.after(1, seconds_of(1.0)) == 99
    assert left.after(2, seconds_of(1.0)) == 98
    assert left.after(4, seconds_of(30.0)) == 96
    assert left.after(4, {}) == 96


def test_time_left_follows_the_recent_steps():
    left = TimeLeft(1000)
    for step in range(100):
        left.after(step, seconds_of(1.0))
    for step in range(100, 140):
        seconds = left.after(step, seconds_of(3.0))
    assert seconds == 3 * (1000 - 139)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_time_is_told_as_a_clock_does(seconds, text):
    out = io.StringIO()
    progress(2, 0, out).update(1, seconds_of(seconds))
    assert out.getvalue() == f"step 1/2  left {text}\n"
