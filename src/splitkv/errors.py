"""What a refused call says.

`ValueError`            the question is malformed: `<argument>: expected <requirement>, got <value>`
`UnsupportedProblem`    well-formed, but no kernel can run it: every kernel with every reason

The `expect_*` functions are used as a table, one line an argument. They look at tensors through
their attributes alone, so this module imports neither torch nor triton.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any


class UnsupportedProblem(NotImplementedError):
    """No kernel can run a well-formed problem on a device; `reasons` has every kernel's."""

    def __init__(
        self, problem: object, device: object, reasons: Iterable[tuple[str, Sequence[str]]]
    ) -> None:
        self.problem = problem
        self.device = device
        self.reasons = tuple((kernel, tuple(against)) for kernel, against in reasons)
        super().__init__(self.problem, self.device, self.reasons)

    def __str__(self) -> str:
        width = max((len(kernel) for kernel, _ in self.reasons), default=0)
        lines = [f"no kernel can run this problem on {self.device}", f"  {self.problem}"]
        for kernel, against in self.reasons:
            for i, reason in enumerate(against):
                lines.append(f"  {kernel if i == 0 else '':<{width}}  {reason}")
        return "\n".join(lines)


def expect(ok: Any, argument: str, requirement: str, got: object, hint: str = "") -> None:
    """Raise `ValueError` in the house grammar unless `ok`; `hint` says what to do about it."""
    if not ok:
        message = f"{argument}: expected {requirement}, got {_shown(got)}"
        raise ValueError(f"{message}; {hint}" if hint else message)


def expect_tensor(argument: str, value: Any) -> None:
    """A tensor: anything with a shape and a dtype."""
    expect(hasattr(value, "shape") and hasattr(value, "dtype"), argument, "a tensor", value)


def expect_shape(argument: str, tensor: Any, /, **dims: int | None) -> tuple[int, ...]:
    """The shape, checked against named sizes in order; None leaves a size free.

    `expect_shape("k_cache", k_cache, num_pages=None, page_size=None, num_kv_heads=8, head_dim=128)`
    """
    if not hasattr(tensor, "shape"):
        expect(False, argument, f"a tensor {_symbolic(dims)}", tensor)
    shape = tuple(tensor.shape)
    wrong = len(shape) != len(dims)
    if not wrong:
        for size, want in zip(shape, dims.values(), strict=True):
            if want is not None and size != want:
                wrong = True
    if wrong:
        raise ValueError(f"{argument}: expected {_symbolic(dims)}, got {list(shape)}")
    return shape


def dtype_name(tensor: Any) -> str:
    """`bfloat16` for a tensor of `torch.bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def expect_dtype(argument: str, tensor: Any, *names: str) -> None:
    """A tensor of one of the dtypes named, without the `torch.` prefix."""
    expect_tensor(argument, tensor)
    got = dtype_name(tensor)
    if got not in names:
        raise ValueError(f"{argument}: expected dtype {_either(names)}, got {got}")


def expect_device(argument: str, tensor: Any, device: Any) -> None:
    """A tensor on `device`, given as a device or as its name."""
    expect_tensor(argument, tensor)
    if str(tensor.device) != str(device):
        raise ValueError(f"{argument}: expected device {device}, got {tensor.device}")


def expect_last_dim_contiguous(argument: str, tensor: Any) -> None:
    """Neighbours along the last dimension are neighbours in memory; other strides are free."""
    expect(hasattr(tensor, "stride"), argument, "a torch tensor", tensor)
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        strides = list(tensor.stride())
        hint = f"pass {argument}.contiguous()"
        expect(False, argument, "stride 1 in the last dimension", strides, hint)


def expect_int(argument: str, value: Any) -> None:
    """An integer, and not a bool."""
    ok = isinstance(value, int | Integral)  # first: of a traced value no attribute is known
    ok = ok or (hasattr(value, "__index__") and not hasattr(value, "shape"))
    expect(ok and not isinstance(value, bool), argument, "an integer", value)


def expect_bool(argument: str, value: Any) -> None:
    """True or False, not something that merely converts."""
    expect(isinstance(value, bool), argument, "True or False", value)


def expect_number(argument: str, value: Any) -> None:
    """A finite number on the host, and not a bool."""
    ok = isinstance(value, int | float | Real)
    ok = ok or (hasattr(value, "__float__") and not hasattr(value, "shape"))
    ok = ok and not isinstance(value, bool) and -math.inf < value < math.inf
    expect(ok, argument, "a finite number", value)


def expect_positive(argument: str, value: Any) -> None:
    """Above zero."""
    expect(value > 0, argument, "more than 0", value)


def expect_at_least(argument: str, value: Any, low: float) -> None:
    """`low` or more."""
    if not value >= low:  # a traced number that is written out is a constant from then on
        expect(False, argument, f"at least {low}", value)


def expect_in_range(argument: str, value: Any, low: float, high: float) -> None:
    """From `low` to `high`, both included."""
    if not low <= value <= high:
        expect(False, argument, f"{low} to {high}", value)


def expect_divides(argument: str, value: int, /, **divisor: int) -> None:
    """A multiple of a named size: `expect_divides("num_heads", 28, num_kv_heads=4)`."""
    for name, size in divisor.items():
        if not (size > 0 and value % size == 0):
            expect(False, argument, f"a multiple of {name}={size}", value)


def expect_one_of(argument: str, value: object, options: Iterable[object], hint: str = "") -> None:
    """One of a closed list."""
    known = tuple(options)
    expect(value in known, argument, _either([repr(option) for option in known]), value, hint)


def expect_none_with(argument: str, value: object, other: str) -> None:
    """Not given, because `other` is: `expect_none_with("cache_seqlens", x, "a dense cache")`."""
    expect(value is None, argument, f"None with {other}", value)


def expect_given_with(argument: str, value: object, other: str) -> None:
    """Given, because `other` is."""
    expect(value is not None, argument, f"a value with {other}", value)


def renamed(error: ValueError, names: Mapping[str, str]) -> ValueError:
    """The error with the caller's name of the argument that it begins with."""
    argument, colon, rest = str(error).partition(":")
    word, space, side = argument.partition(" ")
    return ValueError(f"{names[word]}{space}{side}{colon}{rest}") if word in names else error


def _symbolic(dims: dict[str, int | None]) -> str:
    sizes = (name if size is None else f"{name}={size}" for name, size in dims.items())
    return f"[{', '.join(sizes)}]"


def _either(options: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(options[:-1]), *options[-1:]]))


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"a tensor of shape {list(shape)}"
