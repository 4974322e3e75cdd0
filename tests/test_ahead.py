import threading

import pytest

from ringflash.ahead import Ahead


@pytest.fixture
def row():
    """Ahead of three functions that note their thread; the second waits until it is let go."""
    go, made = threading.Event(), []

    def maker(number):
        def make():
            if number == 1:
                assert go.wait(10)
            made.append((number, threading.current_thread()))
            return number * 10

        return make

    ahead = Ahead([maker(number) for number in range(3)])
    yield ahead, go, made
    go.set()
    ahead.close()


def test_the_next_one_is_made_while_the_one_before_is_in_use(row):
    ahead, go, made = row
    assert made == []
    assert ahead.take(0) == 0
    assert not ahead.ready(1)
    assert [number for number, _ in made] == [0], "and 1 waits to be let go"
    go.set()
    while not ahead.ready(1):
        pass
    assert [number for number, _ in made] == [0, 1], "2 is not begun before 1 is taken"
    assert ahead.take(1) == 10
    assert ahead.take(2) == 20
    assert {thread for _, thread in made} != {threading.current_thread()}


def test_the_first_may_be_any(row):
    ahead, _, made = row
    assert ahead.take(2) == 20
    assert [number for number, _ in made] == [2]


def test_what_is_wrong_is_told_before_it_is_asked_for():
    ahead = Ahead([lambda: 1, lambda: 1 / 0])
    ahead.check_errors()
    assert ahead.take(0) == 1
    while not ahead.ready(1):
        pass
    with pytest.raises(ZeroDivisionError):
        ahead.check_errors()
    with pytest.raises(ZeroDivisionError):
        ahead.take(1)
    ahead.close()


def test_close_waits_for_the_function_that_runs(row):
    ahead, go, made = row
    ahead.take(0)
    while not ahead._begun[1].running():
        pass
    threading.Timer(0.05, go.set).start()
    ahead.close()
    assert [number for number, _ in made] == [0, 1]
