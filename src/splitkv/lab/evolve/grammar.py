"""Policies as typed expressions, which DEAP's genetic programming mutates and crosses over; from
and to Python.

A policy is an expression for each slot: `applies`, or the problem is left to the default;
`num_splits`; on our kernels `tile`, and `pack_gqa` where some have heads apart; on FlashAttention-3
`pack_gqa` and `sm_margin`. What is written
is what a person would write: conditional expressions, comparisons, arithmetic.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from deap import gp

from splitkv.core.errors import expect
from splitkv.lab.evolve.candidate import Tile
from splitkv.lab.evolve.sandbox import ARGUMENTS

CONSTANTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128)
KEYS = (129, 193, 257, 321, 385, 449, 513, 1025, 2049, 4097, 8193, 16385, 32769)
MARGINS = (0, 1, 2, 4, 8, 16)
MAX_DEPTH, MAX_NODES = 8, 120  # of a slot, and of a policy


class _Named(type):
    """Types that hash by name, so that a seed gives the same run in every process."""

    def __hash__(cls) -> int:
        return sum(cls.__name__.encode())


class Number(metaclass=_Named):
    """The type of an integer expression."""


class Truth(metaclass=_Named):
    """The type of a condition."""


class TileShape(metaclass=_Named):
    """The type of a tile."""


def a_constant() -> int:
    return random.choice((*CONSTANTS, *KEYS))


HELPER = """
def ceil_div(a, b):
    return -(-a // max(1, b))
"""


class Primitive(NamedTuple):
    """An operation of expressions: the types of its arguments, its own, how it is written."""

    takes: Sequence[type]
    gives: type
    written: str


PRIMITIVES: Mapping[str, Primitive] = {
    "add": Primitive((Number, Number), Number, "({} + {})"),
    "subtract": Primitive((Number, Number), Number, "({} - {})"),
    "multiply": Primitive((Number, Number), Number, "({} * {})"),
    "ceil_div": Primitive((Number, Number), Number, "ceil_div({}, {})"),
    "least": Primitive((Number, Number), Number, "min({}, {})"),
    "most": Primitive((Number, Number), Number, "max({}, {})"),
    "number_if": Primitive((Truth, Number, Number), Number, "({1} if {0} else {2})"),
    "less": Primitive((Number, Number), Truth, "({} < {})"),
    "both": Primitive((Truth, Truth), Truth, "({} and {})"),
    "either": Primitive((Truth, Truth), Truth, "({} or {})"),
    "truth_if": Primitive((Truth, Truth, Truth), Truth, "({1} if {0} else {2})"),
    "tile_if": Primitive((Truth, TileShape, TileShape), TileShape, "({1} if {0} else {2})"),
}
OPERATORS: Mapping[Any, str] = {
    **{ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply"},
    **{ast.And: "both", ast.Or: "either"},
}
CALLS = {"ceil_div": "ceil_div", "min": "least", "max": "most"}


def _absent(*_: Any) -> None:
    """Expressions are written as Python and run there, never here."""


class Slots:
    """The slots of a policy and what each may be made of."""

    def __init__(self, tiles: Sequence[Tile] = (), apart: Sequence[Tile] = ()) -> None:
        self.tiles, self.apart = tuple(tiles), tuple(apart)
        self.types: dict[str, type] = {"applies": Truth, "num_splits": Number}
        if tiles:
            self.types["tile"] = TileShape
            if apart:
                self.types["pack_gqa"] = Truth
        else:
            self.types |= {"pack_gqa": Truth, "sm_margin": Number}
        self.sets = {name: self._set(name, kind) for name, kind in self.types.items()}

    def _set(self, name: str, kind: type) -> Any:
        pset = gp.PrimitiveSetTyped(name, [Number] * len(ARGUMENTS), kind)
        pset.renameArguments(**{f"ARG{i}": word for i, word in enumerate(ARGUMENTS)})
        for word, primitive in PRIMITIVES.items():
            if self.tiles or primitive.gives is not TileShape:
                pset.addPrimitive(_absent, list(primitive.takes), primitive.gives, word)
        pset.addEphemeralConstant("splitkv_constant", a_constant, Number)
        for value in (True, False):
            pset.addTerminal(value, Truth, str(value))
        for tile in dict.fromkeys((*self.tiles, *self.apart)):
            pset.addTerminal(tile, TileShape, _tile_name(tile))
        return pset

    def random(self, name: str) -> Any:
        """An expression for a slot."""
        return gp.PrimitiveTree(gp.genHalfAndHalf(self.sets[name], 0, 3))


def _tile_name(tile: Tile) -> str:
    return "tile_" + "_".join(map(str, tile))


class Policy(dict[str, Any]):
    """A tree for each slot."""

    @property
    def size(self) -> int:
        """Nodes."""
        return sum(map(len, self.values()))

    def fits(self) -> bool:
        return self.size <= MAX_NODES and all(tree.height <= MAX_DEPTH for tree in self.values())

    def copy(self) -> Policy:
        return Policy((name, gp.PrimitiveTree(tree)) for name, tree in self.items())


def expression(tree: Sequence[Any]) -> str:
    """A tree as Python."""
    stack: list[tuple[Any, list[str]]] = []
    for node in tree:
        stack.append((node, []))
        while len(stack[-1][1]) == stack[-1][0].arity:
            done, parts = stack.pop()
            if done.name in PRIMITIVES:
                text = PRIMITIVES[done.name].written.format(*parts)
            elif done.name.startswith("tile_"):
                text = f"({', '.join(done.name.split('_')[1:])})"
            else:  # an argument of the policy, a truth or a constant
                text = str(done.value)
            if not stack:
                return text[1:-1] if done.name in PRIMITIVES and text[0] == "(" else text
            stack[-1][1].append(text)
    raise AssertionError("a tree without an end")


def source_of(policy: Policy, about: str) -> str:
    """A policy as a Python file; `about`: its docstring."""
    given = ", ".join(ARGUMENTS)
    text = f'"""{about}"""\n'
    text += HELPER if any(n.name == "ceil_div" for tree in policy.values() for n in tree) else ""
    lines = [f"\ndef policy({given}):"]
    if expression(policy["applies"]) != "True":
        lines += [f"    if not ({expression(policy['applies'])}):", "        return None"]
    lines.append(f"    num_splits = max(1, min({expression(policy['num_splits'])}, 1024))")
    margin, tile = "0", "None"
    pack = expression(policy["pack_gqa"]) if "pack_gqa" in policy else "True"
    if "tile" in policy:
        tile = expression(policy["tile"])
    else:
        margin = f"max(0, min({expression(policy['sm_margin'])}, num_sms - 1))"
    lines += [f"    pack_gqa = {pack}", f"    sm_margin = {margin}", f"    tile = {tile}"]
    return text + "\n".join([*lines, "    return num_splits, pack_gqa, sm_margin, tile\n"])


def policy_of(source: str, slots: Slots) -> Policy:
    """The expressions of a file that `source_of` could have written; ValueError for any other."""
    tree = ast.parse(source)
    (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "policy")
    found: dict[str, ast.expr] = {"applies": ast.Constant(True)}
    for statement in function.body:
        match statement:
            case ast.If(
                test=ast.UnaryOp(op=ast.Not(), operand=test), body=[ast.Return()], orelse=[]
            ):
                found["applies"] = test
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.Return(value=ast.Tuple()) | ast.Expr(value=ast.Constant()):
                pass
            case _:
                expect(False, "policy", "assignments and a return", ast.unparse(statement))
    policy = Policy()
    for name in slots.types:
        expect(name in found, "policy", f"{name} = ...", "none")
        nodes = _nodes(_unclamped(found[name]), slots.types[name], slots.sets[name])
        policy[name] = gp.PrimitiveTree(nodes)
    return policy


def _unclamped(node: ast.expr) -> ast.expr:
    """x of max(1, min(x, 1024))."""
    match node:
        case ast.Call(
            func=ast.Name(id="max"),
            args=[ast.Constant(), ast.Call(func=ast.Name(id="min"), args=[inner, limit])],
        ) if isinstance(limit, ast.BinOp) or getattr(limit, "value", None) == 1024:
            return inner
    return node


def _nodes(node: ast.expr, kind: type, pset: Any) -> list[Any]:
    """An expression's nodes of DEAP, in their order."""

    def made(name: str, *parts: ast.expr) -> list[Any]:
        made_by = PRIMITIVES[name]
        expect(made_by.gives is kind, "policy", f"a {kind.__name__}", ast.unparse(node))
        typed = zip(parts, made_by.takes, strict=True)
        inner = [n for part, its in typed for n in _nodes(part, its, pset)]
        return [pset.mapping[name], *inner]

    match node:
        case ast.IfExp(test=test, body=body, orelse=other):
            ways: Mapping[Any, str] = {Number: "number_if", Truth: "truth_if", TileShape: "tile_if"}
            name = ways[kind]
            return made(name, test, body, other)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return made(OPERATORS[type(op)], left, right)
        case ast.BoolOp(op=op, values=[first, *more]):
            rest = more[0] if len(more) == 1 else ast.BoolOp(op=op, values=more)
            return made(OPERATORS[type(op)], first, rest)
        case ast.Compare(left=left, ops=[ast.Lt()], comparators=[right]):
            return made("less", left, right)
        case ast.Call(func=ast.Name(id=called), args=[a, b]) if called in CALLS:
            return made(CALLS[called], a, b)
        case ast.Name(id=name) if name in ARGUMENTS and kind is Number:
            return [pset.mapping[name]]
        case ast.Constant(value=bool() as truth) if kind is Truth:
            return [pset.mapping[str(truth)]]
        case ast.Constant(value=int() as number) if kind is Number:
            return [constant(pset, number)]
        case ast.Tuple() if kind is TileShape:
            name = _tile_name(ast.literal_eval(node))
            expect(name in pset.mapping, "tile", "one of this workload", ast.unparse(node))
            return [pset.mapping[name]]
    expect(False, "policy", f"a {kind.__name__} of the grammar", ast.unparse(node))
    raise AssertionError


def constant(pset: Any, number: int) -> Any:
    node = pset.mapping["splitkv_constant"]()
    node.value = number
    return node


# --- variation --------------------------------------------------------------------------------


def nudge(tree: Any, pset: Any) -> tuple[Any]:
    """A constant becomes a neighbour of its own."""
    places = [i for i, node in enumerate(tree) if node.name == "splitkv_constant"]
    if places:
        i = random.choice(places)
        old = tree[i].value
        near = (old + 1, old - 1, 2 * old, old // 2, old + old // 4, random.choice(MARGINS))
        tree[i] = constant(pset, max(0, random.choice(near)))
    return (tree,)


def _grown(pset: Any, type_: Any) -> list[Any]:
    return gp.genGrow(pset, 0, 2, type_)


MUTATIONS: Mapping[str, Callable[[Any, Any], tuple[Any]]] = {
    "regrow": lambda tree, pset: gp.mutUniform(tree, _grown, pset),
    "replace": lambda tree, pset: (
        gp.mutNodeReplacement(tree, pset) if len(tree) > 1 else gp.mutUniform(tree, _grown, pset)
    ),
    "insert": lambda tree, pset: gp.mutInsert(tree, pset),
    "shrink": lambda tree, pset: gp.mutShrink(tree),
    "nudge": nudge,
}


def mutated(policy: Policy, slots: Slots) -> tuple[Policy, str]:
    """A slot changed, and by which mutation; the policy itself where it would become too large."""
    child = policy.copy()
    name, how = random.choice(list(child)), random.choice(list(MUTATIONS))
    (child[name],) = MUTATIONS[how](child[name], slots.sets[name])
    return (child, f"{how} {name}") if child.fits() else (policy.copy(), "kept")


def crossed(a: Policy, b: Policy) -> tuple[Policy, str]:
    """One slot crossed over at a point, every other taken from either parent."""
    child = Policy((n, gp.PrimitiveTree(random.choice((a, b))[n])) for n in a)
    name = random.choice(list(child))
    first, second = (gp.PrimitiveTree(parent[name]) for parent in (a, b))
    child[name] = gp.cxOnePoint(first, second)[0]
    return (child, f"cross {name}") if child.fits() else (a.copy(), "kept")
