"""The messages of refused calls.

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

MAX_SIZE = (1 << 30) - 1  # of a size or length: kernels add two of them in 32 bits
STRIDED = "torch.strided"


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


def is_tensor(value: Any) -> bool:
    """A shape and strides, which NumPy's arrays do not tell in this way."""
    return hasattr(value, "shape") and hasattr(value, "stride")


def expect_tensor(argument: str, value: Any, requirement: str = "a tensor") -> None:
    """A tensor of torch whose elements lie in memory by strides."""
    if not is_strided(argument, value):
        array = hasattr(value, "shape") or isinstance(value, list | tuple)
        hint = f"pass torch.as_tensor({argument})" if array else ""
        expect(False, argument, requirement, value, hint)


def is_strided(argument: str, value: Any) -> bool:
    """Whether it is a tensor; raises for one that is sparse, nested or in another library's layout,
    of which torch tells no strides."""
    nested = getattr(value, "is_nested", False)  # first: it may have no shape
    if not nested and not is_tensor(value):
        return False
    layout = "nested" if nested else str(getattr(value, "layout", STRIDED))
    if layout != STRIDED:
        hint = "" if nested else f"; pass {argument}.to_dense()"
        raise ValueError(f"{argument}: expected a strided tensor, got layout {layout}{hint}")
    return True


def expect_shape(argument: str, tensor: Any, /, **dims: int | None) -> tuple[int, ...]:
    """The shape, checked against named sizes in order; None leaves a size free.

    `expect_shape("k_cache", k_cache, num_pages=None, page_size=None, num_kv_heads=8, head_dim=128)`
    """
    if not is_strided(argument, tensor):
        expect_tensor(argument, tensor, f"a tensor {_symbolic(dims)}")
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
        hint = ""
        if names == ("int32",) and got in ("int64", "int16", "int8", "uint8"):
            hint = f"; pass {argument}.int()"
        raise ValueError(f"{argument}: expected dtype {_either(names)}, got {got}{hint}")


def expect_device(argument: str, tensor: Any, device: Any) -> None:
    """A tensor on `device`, given as a device or as its name."""
    expect_tensor(argument, tensor)
    if str(tensor.device) != str(device):
        raise ValueError(f"{argument}: expected device {device}, got {tensor.device}")


def expect_last_dim_contiguous(argument: str, tensor: Any) -> None:
    """Neighbours along the last dimension are neighbours in memory; other strides are free, and so
    are all of a tensor without elements, which `contiguous()` leaves as they are."""
    expect_tensor(argument, tensor)
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and 0 not in tensor.shape:
        strides = list(tensor.stride())
        hint = f"pass {argument}.contiguous()"
        expect(False, argument, "stride 1 in the last dimension", strides, hint)


def expect_apart(argument: str, tensor: Any) -> None:
    """Each element has memory of its own, as something that is written needs."""
    dims = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]
    for i, (_, step) in enumerate(dims):
        within = [x for j, x in enumerate(dims) if x[1] < step or (x[1] == step and j > i)]
        if step < 1 + sum((n - 1) * inner for n, inner in within):
            strides = list(tensor.stride())
            hint = f"pass {argument}.contiguous()"
            expect(False, argument, "elements that do not share memory", strides, hint)


def expect_int(argument: str, value: Any) -> None:
    """An integer, and not a bool."""
    ok = isinstance(value, int | Integral)  # first: of a traced value no attribute is known
    ok = ok or (hasattr(value, "__index__") and not hasattr(value, "shape"))
    expect(ok and not isinstance(value, bool), argument, "an integer", value)


def expect_size(argument: str, value: Any, *, empty: bool = False) -> None:
    """How many there are of something, or at most: an integer above 0, with `empty` or 0, that is
    no larger than MAX_SIZE."""
    expect_int(argument, value)
    if empty:
        expect_at_least(argument, value, 0)
    else:
        expect_positive(argument, value)
    if not value <= MAX_SIZE:  # a traced number that is written out is a constant from then on
        expect(False, argument, f"at most {MAX_SIZE}", value)


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
    if value not in known:
        expect(False, argument, _either([repr(option) for option in known]), value, hint)


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
    if word not in names:
        return error
    rest = rest.replace(f"; pass {word}.", f"; pass {names[word]}.")
    rest = rest.replace(f"torch.as_tensor({word})", f"torch.as_tensor({names[word]})")
    return ValueError(f"{names[word]}{space}{side}{colon}{rest}")


def _symbolic(dims: dict[str, int | None]) -> str:
    sizes = (name if size is None else f"{name}={size}" for name, size in dims.items())
    return f"[{', '.join(sizes)}]"


def _either(options: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(options[:-1]), *options[-1:]]))


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is None or not isinstance(shape, tuple):
        return repr(value)
    kind = "tensor" if is_tensor(value) else f"{type(value).__module__}.{type(value).__name__}"
    return f"a {kind} of shape {list(shape)}"
