"""Checks of integer arguments, such as ranks, tags and sizes, and of lists of them."""

from __future__ import annotations

import operator

from mpicoll.errors import ArgumentTypeError

#: Maximum number of characters of a value that a message shows.
_MAX_SHOWN_COUNT = 40


def check_index(value: object, where: str) -> int:
    """Convert an argument that must be one integer, such as a rank or a tag, to an int.

    value: an int of Python or NumPy, or an array or tensor with one integer. True is 1.
    where: operation and argument for the message ("broadcast: src").

    Raises ArgumentTypeError for anything else.
    """
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # the last two of arrays
        raise ArgumentTypeError(
            f"{where}: expected an int of Python, NumPy or torch, got {describe_value(value)}"
        ) from None


def check_indices(values: object, where: str) -> list[int]:
    """Convert an argument that must be a list of integers, such as ranks, to a list of ints.

    values: an iterable whose items ``check_index`` accepts; text and bytes are rejected.

    Raises ArgumentTypeError for anything else.
    """
    try:
        if isinstance(values, (str, bytes, bytearray, memoryview)):
            raise TypeError
        items = list(values)  # type: ignore[call-overload]
    except TypeError:  # also raised for an array without dimensions
        raise ArgumentTypeError(
            f"{where}: expected a list of ints, got {describe_value(values)}"
        ) from None
    return [check_index(item, f"{where}[{i}]") for i, item in enumerate(items)]


def describe_value(value: object) -> str:
    """Return the type of a wrong argument, and its value if it is short."""
    kind, text = type(value).__name__, repr(value)
    is_short = isinstance(value, (str, bytes, float, complex)) and len(text) <= _MAX_SHOWN_COUNT
    return f"{kind} {text}" if is_short else kind
