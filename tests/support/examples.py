"""Runs the examples of docstrings, with ``await`` or without, and compares what they print."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import types
from collections.abc import Iterator
from typing import Any

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples(module: types.ModuleType) -> Iterator[tuple[str, str]]:
    """Name and docstring of everything in a module that has examples."""
    for name, found in vars(module).items():
        if getattr(found, "__module__", None) != module.__name__:
            continue
        if isinstance(found, type):
            members = [(f"{name}.{key}", _function(value)) for key, value in vars(found).items()]
        else:
            members = []
        for label, each in [(name, found), *members]:
            text = inspect.getdoc(each) if callable(each) or isinstance(each, type) else None
            if text and ">>> " in text:
                yield label, text


def _function(value: Any) -> Any:
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def run(text: str, names: dict[str, Any]) -> None:
    """Run one docstring's examples in order, on one event loop.

    Raises:
        AssertionError: one printed something else.
    """
    scope = dict(names)
    checker = doctest.OutputChecker()
    with asyncio.Runner() as runner:
        for example in doctest.DocTestParser().get_examples(text):
            code = compile(example.source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                if code.co_flags & inspect.CO_COROUTINE:
                    runner.run(types.FunctionType(code, scope)())
                else:
                    exec(code, scope)
            assert checker.check_output(example.want, printed.getvalue(), FLAGS), (
                f"{example.source}printed {printed.getvalue()!r}, the docstring says {example.want!r}"
            )
