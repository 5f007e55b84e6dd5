r"""Small faults for a source file: a swapped operator, another constant, a dropped statement, one at a time.

    >>> [(m.text, m.what) for m in mutants("a.py", "x = a + 1\n")]
    [('x = a + 1', 'a + 1 -> a - 1'), ('x = a + 1', '1 -> 2')]

Each is a change of the text between two positions of the file, found in its syntax tree. What cannot change what the
code does is left alone: annotations, docstrings, messages, assertions, imports.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Change = tuple[Any, str, str]  # what is replaced, by what, and how that is called

ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
}  # fmt: skip
COMPARISON: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
NAMES = {
    "min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any", "sum": "mean",
    "mean": "sum", "maximum": "minimum", "minimum": "maximum", "argmax": "argmin", "zeros_like": "ones_like",
    "ones_like": "zeros_like", "cos": "sin", "exp": "expm1", "softmax": "log_softmax", "floor": "ceil",
}  # fmt: skip
LEFT_OUT = frozenset(("abs", "abs_", "sign", "double", "clone", "sigmoid", "relu", "sqrt", "square", "conj", "flip"))
# Keywords that change no result, or only say what holds anyway.
SAME_WITHOUT = frozenset(("strict", "device", "memory_format", "frozen", "align_corners"))


@dataclass(frozen=True)
class Mutant:
    """One fault. `owner`, `text` and `what` name it, also after lines have moved; `nth` tells repetitions apart."""

    file: str
    line: int
    owner: str  # the function it is in, "Ledger.total"; "" outside of functions
    text: str
    what: str
    nth: int
    span: tuple[int, int]  # bytes of the source
    new: str
    lines: tuple[int, int]  # of its statement: one of these runs when it does
    around: tuple[int, int]  # lines of the function, or of the statement outside of functions
    version: str  # changes when the function does, or the statement outside of functions

    @property
    def key(self) -> str:
        owner = f"{self.owner}: " if self.owner else ""
        repeated = f" #{self.nth}" if self.nth > 1 else ""
        return f"{owner}{self.text} :: {self.what}{repeated}"

    def applied(self, source: str) -> str:
        """The source with the fault in it."""
        raw, (start, end) = source.encode(), self.span
        return (raw[:start] + self.new.encode() + raw[end:]).decode()


def mutants(file: str, source: str) -> list[Mutant]:
    """All faults of a file, in its order."""
    lines = source.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line.encode()))
    found, seen = [], Counter[tuple[str, str, str]]()
    changes = sorted(_changes(ast.parse(source)), key=lambda found: (found[0][0].lineno, found[0][0].col_offset))
    for (at, new, what), parents in changes:
        span = offsets[at.lineno - 1] + at.col_offset, offsets[at.end_lineno - 1] + at.end_col_offset
        text = lines[at.lineno - 1].strip()
        owner, node = _owner((*parents, at))
        seen[owner, text, what] += 1
        statement: Any = next(n for n in (at, *reversed(parents)) if isinstance(n, ast.stmt))
        last = statement.body[0].lineno - 1 if hasattr(statement, "body") else statement.end_lineno
        reached = statement.lineno, max(statement.lineno, last)
        nth, around = seen[owner, text, what], (node.lineno, node.end_lineno or node.lineno)
        mutant = Mutant(file, at.lineno, owner, text, what, nth, span, new, reached, around, _version(node))
        if _compiles(mutant, (*parents, at)[1], offsets, source):
            found.append(mutant)
    return found


def _owner(path: Sequence[ast.AST]) -> tuple[str, ast.stmt]:
    """The outermost function on the way to a node, with its name; or the node's statement if there is none."""
    names: list[str] = []
    for node in path:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        if isinstance(node, ast.FunctionDef):
            return ".".join(names), node
    return "", next(node for node in reversed(path) if isinstance(node, ast.stmt))


def functions(source: str) -> dict[str, tuple[int, int, str]]:
    """The first line, the last line and the version of each function that is not inside another, by its name."""
    found: dict[str, tuple[int, int, str]] = {}
    for node, parents in _walk(ast.parse(source), ()):
        if isinstance(node, ast.FunctionDef):
            name, outermost = _owner((*parents, node))
            found[name] = outermost.lineno, outermost.end_lineno or outermost.lineno, _version(outermost)
    return found


def _version(node: ast.AST) -> str:
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:12]


def _compiles(mutant: Mutant, statement: Any, offsets: Sequence[int], source: str) -> bool:
    """Whether the statement of the module that a fault is in can still be parsed."""
    first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
    begin, end = offsets[first - 1], offsets[statement.end_lineno]
    raw, (start, stop) = source.encode(), mutant.span
    try:
        ast.parse(raw[begin:start] + mutant.new.encode() + raw[stop:end])
    except SyntaxError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ where to look


def _changes(tree: ast.Module) -> Iterator[tuple[Change, tuple[ast.AST, ...]]]:
    """Each change with what it stands in, from the module down."""
    for node, parents in _walk(tree, ()):
        for change in CHANGES:
            for found in change(node, parents):
                yield found, (*parents, node)


def _walk(node: ast.AST, parents: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    yield node, parents
    for child in _children(node):
        yield from _walk(child, (*parents, node))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that have a say in what the code does."""
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "cast", "TypeVar"):
        return
    if _lists_names(node) or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("lru_cache")):
        return
    aside = {"annotation", "returns", "type_comment", "ctx"}
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp) and _names_a_type(node):
        return
    for name, value in ast.iter_fields(node):
        if name not in aside:
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    yield part


def _names_a_type(node: ast.Assign) -> bool:
    """`Rule = Callable[[Node], Shares]`: a capital and then small letters."""
    target = node.targets[0]
    return isinstance(target, ast.Name) and target.id[:1].isupper() and not target.id.isupper()


def _lists_names(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


# ------------------------------------------------------------------------------------------- the kinds of faults


def _replaced(node: ast.expr, new: ast.expr | str) -> Change:
    text = new if isinstance(new, str) else ast.unparse(new)
    return node, f"({text})", f"{_short(ast.unparse(node))} -> {_short(text)}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}"


def _with(node: Any, **fields: Any) -> Any:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _operators(node: ast.AST, parents: tuple[ast.AST, ...]) -> Iterator[Change]:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield _replaced(node, _with(node, op=ARITHMETIC[type(node.op)]()))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):  # of sets and dictionaries, mostly
        yield _replaced(node, node.left)
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], COMPARISON[type(op)](), *node.ops[i + 1 :]]
            yield _replaced(node, _with(node, ops=ops))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _replaced(node, _with(node, op=other))
        for i in range(len(node.values)):
            rest = [*node.values[:i], *node.values[i + 1 :]]
            yield _replaced(node, rest[0] if len(rest) == 1 else _with(node, values=rest))
    elif isinstance(node, ast.UnaryOp):
        yield _replaced(node, node.operand)
    elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        new = ast.unparse(_with(node, op=ARITHMETIC[type(node.op)]()))
        yield node, new, f"{_short(ast.unparse(node))} -> {_short(new)}"


def _constants(node: ast.AST, parents: tuple[ast.AST, ...]) -> Iterator[Change]:
    if not isinstance(node, ast.Constant) or _says(node, parents):
        return
    value = node.value
    if isinstance(value, bool):
        if not isinstance(parents[-1], ast.keyword):  # there, leaving it out is the fault
            yield _replaced(node, str(not value))
    elif isinstance(value, int):
        yield _replaced(node, str(value + 1))
    elif isinstance(value, float):
        yield _replaced(node, repr(2 * value if value else 1.0))
    elif isinstance(value, str):
        yield _replaced(node, repr(f"other_{value}"))


def _says(node: ast.Constant, parents: tuple[ast.AST, ...]) -> bool:
    """Whether a text is there to be read: a docstring, a message, what a table says about a method."""
    if not isinstance(node.value, str):
        return False
    return isinstance(parents[-1], ast.Expr) or " " in node.value or _describes(parents)


def _describes(parents: tuple[ast.AST, ...]) -> bool:
    return any(isinstance(p, ast.keyword) and p.arg in ("family", "summary", "paper") for p in parents)


def _branches(node: ast.AST, parents: tuple[ast.AST, ...]) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.While):
        if not isinstance(node.test, ast.Compare | ast.UnaryOp) or len(ast.unparse(node.test).split(" and ")) > 1:
            yield _replaced(node.test, f"not ({ast.unparse(node.test)})")
        yield node.test, "(False)", f"if {_short(ast.unparse(node.test))} -> never"
    elif isinstance(node, ast.IfExp):
        yield _replaced(node, node.body)
        yield _replaced(node, node.orelse)
    elif isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield test, "(True)", f"if {_short(ast.unparse(test))} -> always"


def _statements(node: ast.AST, parents: tuple[ast.AST, ...]) -> Iterator[Change]:
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    yields = isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield | ast.YieldFrom)
    done = isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break)
    again = isinstance(node, ast.Assign) and any(_assigned_before(t, node, parents) for t in node.targets)
    if (done or again) and not docstring and not yields:
        text = ast.unparse(node)
        # A function with super() has a cell, __class__; one without it could not take its place.
        yield node, "__class__" if "super()" in text else "pass", f"{_short(text)} -> dropped"


def _assigned_before(target: ast.expr, node: ast.Assign, parents: tuple[ast.AST, ...]) -> bool:
    """Whether the code still runs without an assignment: an item or attribute, or a name that is there already."""
    if isinstance(target, ast.Subscript | ast.Attribute):
        return True
    function = next((p for p in reversed(parents) if isinstance(p, ast.FunctionDef)), None)
    names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    if function is None or not names:
        return False
    before = {a.arg for a in [*function.args.args, *function.args.kwonlyargs]}
    for other in ast.walk(function):
        if isinstance(other, ast.Name) and isinstance(other.ctx, ast.Store) and other.lineno < node.lineno:
            before.add(other.id)
    return names <= before


def _calls(node: ast.AST, parents: tuple[ast.AST, ...]) -> Iterator[Change]:
    if not isinstance(node, ast.Call) or ast.unparse(node.func).endswith("lru_cache"):
        return
    for i, keyword in enumerate(node.keywords):
        if keyword.arg and keyword.arg not in SAME_WITHOUT and not _describes((keyword,)):
            rest = [*node.keywords[:i], *node.keywords[i + 1 :]]
            what = f"{_short(ast.unparse(keyword))} -> left out of {_short(ast.unparse(node.func))}"
            yield node, ast.unparse(_with(node, keywords=rest)), what
    yield from _other_bound(node)
    func = node.func
    if isinstance(func, ast.Attribute) and func.attr in LEFT_OUT and not node.args:
        yield _replaced(node, func.value)
    if isinstance(func, ast.Attribute) and func.attr in NAMES:
        yield _replaced(func, _with(func, attr=NAMES[func.attr]))
    if isinstance(func, ast.Name) and func.id in NAMES:
        yield _replaced(func, NAMES[func.id]) if func.id != "sum" else _replaced(func, "max")


def _other_bound(node: ast.Call) -> Iterator[Change]:
    """clamp(min=) and clamp(max=)."""
    for i, keyword in enumerate(node.keywords):
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("clamp", "clamp_") and keyword.arg in NAMES:
            other = [*node.keywords[:i], _with(keyword, arg=NAMES[keyword.arg]), *node.keywords[i + 1 :]]
            yield _replaced(node, _with(node, keywords=other))


CHANGES: tuple[Callable[[ast.AST, tuple[ast.AST, ...]], Iterator[Change]], ...] = (
    _operators, _constants, _branches, _statements, _calls,
)  # fmt: skip
