"""Results of a row of functions, each made in a thread while the result before it is in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """`take(n)` hands out what `makers[n]()` makes, and has n + 1 begun: for n + 1 nobody waits.

    One function runs at a time. Take in order; the first may be any.
    """

    def __init__(self, makers: Sequence[Callable[[], T]]) -> None:
        self._makers = makers
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._begun: dict[int, Future[T]] = {}

    def take(self, number: int) -> T:
        """The result, waited for where it is not there yet; raises what the function raised."""
        result = self._begin(number).result()
        del self._begun[number]
        if number + 1 < len(self._makers):
            self._begin(number + 1)
        return result

    def ready(self, number: int) -> bool:
        """Whether `take` would not wait."""
        return number in self._begun and self._begun[number].done()

    def check_errors(self) -> None:
        """Raise what a function has raised whose result nobody has taken yet; does not wait."""
        for result in self._begun.values():
            if result.done():
                result.result()

    def close(self) -> None:
        """Wait for the function that is running; begin no other."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, number: int) -> Future[T]:
        if number not in self._begun:
            self._begun[number] = self._pool.submit(self._makers[number])
        return self._begun[number]
