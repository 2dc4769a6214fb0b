"""Hooks around messages: order, failures, and what a hook cannot do (clients#interceptors)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mqstore import Interceptor, QueueRef
from mqstore.client.interceptors import Interceptors
from tests.client.pushsupport import hook


def messages(*offsets: int) -> list[Any]:
    return [SimpleNamespace(offset=offset, queue=QueueRef("t", 0)) for offset in offsets]


class Around(Interceptor):
    def __init__(self, seen: list[str], name: str, how: str = "call") -> None:
        self.seen, self.name, self.how = seen, name, how

    def around_consume(self, call: Callable[[], None], messages: Sequence[Any]) -> None:
        self.seen.append(f"{self.name}>")
        if self.how == "fails before":
            raise RuntimeError("mine")
        if self.how == "swallows":
            try:
                call()
            except Exception:
                self.seen.append("swallowed")
        elif self.how == "twice":
            call()
            call()
        elif self.how == "replaces":
            try:
                call()
            except Exception as error:
                raise KeyError("another") from error
        elif self.how != "forgets":
            call()
        if self.how == "fails after":
            raise RuntimeError("mine")
        self.seen.append(f"<{self.name}")


# --- receiving -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (lambda given: given, [1, 2, 3]),
        (lambda given: [], []),
        (lambda given: given[1:], [2, 3]),
        (lambda given: given[::-1], [1, 2, 3]),  # a position is the lowest: order is not a hook's
        (lambda given: [*given, *given], [1, 2, 3]),
        (lambda given: [*given, *messages(9)], [1, 2, 3]),
        (lambda given: (each for each in given if each.offset != 2), [1, 3]),
        (lambda given: None, [1, 2, 3]),
        (lambda given: ["no message"], [1, 2, 3]),
        (lambda given: given.clear() or given, []),
        (lambda given: 1 / 0, [1, 2, 3]),
    ],
)
def test_a_hook_chooses_among_what_came_and_can_do_nothing_else(choose: Any, expected: list[int]) -> None:
    came = messages(1, 2, 3)
    kept = Interceptors([hook(on_receive=choose)]).receiving(came)
    assert [message.offset for message in kept] == expected
    assert all(message in came for message in kept)


def test_each_hook_sees_what_those_before_it_left() -> None:
    seen: list[int] = []
    second = hook(on_receive=lambda given: seen.extend(each.offset for each in given) or given)
    Interceptors([hook(on_receive=lambda given: given[1:]), second]).receiving(messages(1, 2))
    assert seen == [2]


# --- around --------------------------------------------------------------------------------------------------------


def test_the_first_one_is_outermost() -> None:
    seen: list[str] = []
    chain = Interceptors([Around(seen, "a"), Around(seen, "b")])
    chain.consuming(lambda: seen.append("handler"), [])
    assert seen == ["a>", "b>", "handler", "<b", "<a"]


@pytest.mark.parametrize("how", ["call", "fails before", "fails after", "swallows", "twice", "replaces", "forgets"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("error", [None, ValueError("handler's"), SystemExit(1)])
def test_hook_errors_do_not_change_the_handler_call(how: str, place: int, error: BaseException | None) -> None:
    seen: list[str] = []
    hooks = [Around(seen, name) for name in "abc"]
    hooks[place].how = how
    calls: list[int] = []

    def handler() -> None:
        calls.append(1)
        if error is not None:
            raise error

    chain = Interceptors(hooks)
    if error is None:
        chain.consuming(handler, [])
    else:
        with pytest.raises(type(error)) as caught:
            chain.consuming(handler, [])
        assert caught.value is error
    assert calls == [1]
