import io

import pytest

from ringflash.observe import progress as module
from ringflash.observe.progress import TimeLeft, progress

METRICS = {"train/loss": 3.2138, "perf/tokens_per_second": 4096.4, "train/grad_norm": 1.0}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Set `clock.now` to say what time it is."""

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_lines_where_there_is_no_terminal(clock):
    out = io.StringIO()
    shown = progress(60, 10, out)
    for step, now in [(11, 100.0), (12, 100.75)]:
        clock.now = now
        shown.update(step, METRICS)
    shown.note("saved")
    shown.close()
    assert out.getvalue().splitlines() == [
        "step 11/60  loss 3.214  tokens/s 4,096  left ?",
        "step 12/60  loss 3.214  tokens/s 4,096  left 0:36",
        "saved",
    ]


def test_metrics_that_are_not_given_are_not_shown():
    out = io.StringIO()
    progress(60, 0, out).update(1, {"train/loss": 1.0})
    assert out.getvalue() == "step 1/60  loss 1.000  left ?\n"


def test_a_bar_on_a_terminal(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    shown = progress(60, 10, out)
    for step, now in [(11, 100.0), (12, 100.75)]:
        clock.now = now
        shown.update(step, METRICS)
    shown.note("[saved]")
    shown.close()
    text = out.getvalue()
    assert "12/60" in text
    assert "loss 3.214  tokens/s 4,096  left 0:36" in text
    assert "[saved]" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


def test_time_left_does_not_count_the_compile_and_shrugs_off_a_slow_step():
    left = TimeLeft(100)
    assert left.after(1, now=60.0) is None
    assert left.after(2, now=61.0) == 98
    assert left.after(4, now=63.0) == 96
    assert left.after(5, now=93.0) == 95
    assert left.after(5, now=94.0) == 95


def test_time_left_follows_the_recent_steps():
    left = TimeLeft(1000)
    for step in range(100):
        left.after(step, now=step)
    for step in range(100, 140):
        seconds = left.after(step, now=100 + 3 * (step - 100))
    assert seconds == 3 * (1000 - 139)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_time_is_told_as_a_clock_does(clock, seconds, text):
    out = io.StringIO()
    shown = progress(2, 0, out)
    shown.update(0, {})
    clock.now = seconds
    shown.update(1, {})
    assert out.getvalue().splitlines()[1] == f"step 1/2  left {text}"
