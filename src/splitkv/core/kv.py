"""Where the keys and values live, and how they are stored: two independent axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from splitkv.core.values import Value

CodecName = Literal["as_is", "fp8", "fp8_e5m2", "int8"]
Granularity = Literal["none", "tensor", "head", "token"]
Products = Literal["widened", "half", "full"]
"""The products that may be computed in 8 bits with quantised K and V: none (widened); q . k,
for which q is rounded too (half); or p . v as well, for which p is (full)."""


class Stored(NamedTuple):
    """How a codec stores an element in one byte.

    dtype      torch's name of the type, by which a tensor tells its codec
    largest    the largest stored value: a scale maps the largest number to it
    products   what may be multiplied in 8 bits where nobody says; "widened" is always right
    """

    dtype: str
    largest: float
    products: Products


CODECS: dict[CodecName, Stored] = {
    "int8": Stored("int8", 127.0, "half"),
    "fp8": Stored("float8_e4m3fn", 448.0, "widened"),
    "fp8_e5m2": Stored("float8_e5m2", 57344.0, "widened"),
}
"""Every codec but as_is, in the order in which messages list them."""


@dataclass(frozen=True, slots=True)
class Contiguous(Value):
    """`[batch, seqlen_k, num_kv_heads, head_dim]`, one slab a sequence."""

    TAG: ClassVar[str | None] = "contiguous"

    def __str__(self) -> str:
        return "contiguous"


@dataclass(frozen=True, slots=True)
class Ragged(Value):
    """`[total_k, num_kv_heads, head_dim]`, sequences one after the other, bounds in
    `cu_seqlens_k`."""

    TAG: ClassVar[str | None] = "ragged"

    def __str__(self) -> str:
        return "ragged"


@dataclass(frozen=True, slots=True)
class Paged(Value):
    """`[num_pages, page_size, num_kv_heads, head_dim]`; `page_table[b, i]` holds keys `i *
    page_size` and following of sequence b."""

    TAG: ClassVar[str | None] = "paged"
    page_size: int

    def __str__(self) -> str:
        return f"paged({self.page_size})"


Place = Contiguous | Ragged | Paged


@dataclass(frozen=True, slots=True)
class Codec(Value):
    """How one element of K or V is stored: as the working type, or quantised with scales.

    The value is `stored * scale`; scales are per tensor, per KV head, or per token and head.
    """

    name: CodecName = "as_is"
    granularity: Granularity = "none"

    @property
    def element_bytes(self) -> int | None:
        """Bytes an element, or None where the element is of the working type."""
        return None if self.name == "as_is" else 1

    def __str__(self) -> str:
        return self.name if self.name == "as_is" else f"{self.name} per {self.granularity}"


AS_IS = Codec()
