"""Make generated methods look like written ones in ``help()``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

M = TypeVar("M", bound=Callable[..., Any])


def copy_signature(method: M, build: Callable[..., Any], *, name: str = "", answer: str = "") -> M:
    """Give a method the name, docstring and parameters of the function that builds its call."""
    told = inspect.signature(build)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    answer = answer or str(told.return_annotation).removeprefix("Call[").removesuffix("]")
    method.__name__ = method.__qualname__ = name or build.__name__
    method.__doc__ = build.__doc__
    method.__signature__ = told.replace(  # type: ignore[attr-defined]
        parameters=[own, *told.parameters.values()], return_annotation=answer
    )
    return method
