"""Make a client's method of a function that says what is to be sent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from sidecar.client.wire import Call

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Waits(Protocol):
    """A client whose methods return an answer once it is there."""

    def _send(self, call: Call[T], /) -> T: ...


class Awaits(Protocol):
    """A client whose methods return something to await."""

    def _send(self, call: Call[T], /) -> Coroutine[Any, Any, T]: ...


class Method(Protocol[P, T_co]):
    """The same method of both kinds of clients, for type checkers: with the parameters as they are written, it returns
    an answer from the one and an awaitable of it from the other."""

    @overload
    def __get__(self, client: Waits, owner: object = None, /) -> Callable[P, T_co]: ...
    @overload
    def __get__(self, client: Awaits, owner: object = None, /) -> Callable[P, Coroutine[Any, Any, T_co]]: ...


def sent(build: Callable[Concatenate[Any, P], Call[T]]) -> Method[P, T]:
    """Decorate a function that builds a call: as a method, it has the client send that call."""

    @functools.wraps(build)
    def method(client: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return client._send(build(client, *args, **kwargs))

    return cast(Method[P, T], method)
