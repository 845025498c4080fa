"""Structural search and replace: a pattern finds code whatever its layout, and whatever names it leaves open.

A pattern is code with holes: `$x` is any expression or name, the same wherever the pattern repeats it, and `...` is any number of
arguments, elements, operands or statements. The replacement repeats the holes. Python is compared as syntax trees, so that quotes,
comments, line breaks and parentheses do not matter. C++ and JavaScript are compared as tokens: there `$x` is one word, and `...`
any text without a semicolon.
"""

import ast
import functools
import re
import textwrap
from typing import NamedTuple

HOLE, REST = "hole_", "rest_"
TOKEN = re.compile(r"""\$?\w+|"[^"\n]*"|'[^'\n]*'|\.\.\.|\S""")
WORD, ANY, GAP = r"\w[\w.]*", r"[^;]*?", r"(?:\s|//[^\n]*\n|/\*.*?\*/)*"


class Edit(NamedTuple):
    """Place of a match in a text, in bytes, and its replacement."""

    start: int
    end: int
    new: str


def find_edits(text, pattern, replacement, scope=None):
    """Yield the edits of a text at all matches of a pattern.

    Args:
        text: the source.
        pattern, replacement: code with holes.
        scope: qualified name of the function or class in which a match counts, "" for all; None if the text is not Python.
    """
    if scope is None:
        yield from _edit_tokens(text, pattern, replacement)
        return
    old, new = _parse(pattern), _parse(replacement)
    is_expression = len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr)
    for nodes in _list_candidates(text, scope, 0 if is_expression else len(old)):
        holes = {}
        if _matches(old[0].value if is_expression else old, nodes[0] if is_expression else nodes, holes):
            first, last = nodes[0], nodes[-1]
            filled = ast.unparse(ast.fix_missing_locations(ast.Module(_fill(new, holes), [])))
            filled = f"({filled})" if is_expression else textwrap.indent(filled, " " * first.col_offset).lstrip()
            lines = text.encode().splitlines(keepends=True)
            start = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
            end = sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
            filled = "el" * text.encode().startswith(b"elif", start) + filled
            yield Edit(start, end, filled)


# --- Python ---------------------------------------------------------------------------------------------------------------


_tree = functools.cache(ast.parse)  # trees are not changed


@functools.cache
def _parse(code):
    """Return the statements of a pattern, in which holes are names; an ellipsis that begins a subscript or a word stays."""
    numbers = iter(range(100))
    return ast.parse(re.sub(r"(?<!\[)\.\.\.(?!\w)", lambda _: f"{REST}{next(numbers)}", code.replace("$", HOLE))).body


@functools.cache
def _list_candidates(text, scope, count):
    """Return each expression of a scope, or each run of `count` statements."""
    scopes = [_tree(text)]
    for name in filter(None, scope.split(".")):
        scopes = [node for outer in scopes for node in ast.walk(outer) if getattr(node, "name", None) == name]
    nodes = [node for tree in scopes for node in ast.walk(tree)]
    if count == 0:
        return [[node] for node in nodes if isinstance(node, ast.expr)]
    bodies = [value for node in nodes for _, value in ast.iter_fields(node) if isinstance(value, list)]
    runs = [body[k : k + count] for body in bodies for k in range(len(body) - count + 1)]
    return [run for run in runs if isinstance(run[0], ast.stmt)]


def _name_of(node):
    """Return the name of a hole, "" for other nodes; an attribute, an argument and a statement can be holes too."""
    if isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg is None):
        node = node.value
    name = node.id if isinstance(node, ast.Name) else node
    return name if isinstance(name, str) and name.startswith((HOLE, REST)) else ""


def _fields(node):
    """Yield what makes a node what it is; the arguments of a call in one list."""
    if isinstance(node, ast.Call):
        yield from (node.func, [*node.args, *node.keywords])
    else:
        yield from (getattr(node, name, None) for name in node._fields if name not in ("ctx", "kind", "type_comment"))


def _matches(pattern, node, holes):
    """Return whether a node has the form of a pattern, and put what the holes stand for into `holes`."""
    if name := _name_of(pattern):
        node = node.id if isinstance(node, ast.Name) else node
        before = holes.setdefault(name, node)
        return before == node if isinstance(before, str) else _matches(before, node, {})
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and _matches([*_fields(pattern)], [*_fields(node)], holes)
    if not isinstance(pattern, list):
        return type(pattern) is type(node) and pattern == node
    if not pattern or not isinstance(node, list):
        return pattern == node
    first, *others = pattern
    for count in range(len(node) + 1) if _name_of(first).startswith(REST) else ():
        trial = holes | {_name_of(first): node[:count]}
        if _matches(others, node[count:], trial):
            holes.update(trial)
            return True
    return (
        bool(node)
        and not _name_of(first).startswith(REST)
        and _matches(first, node[0], holes)
        and _matches(others, node[1:], holes)
    )


def _fill(node, holes):
    """Return a replacement with what its holes stand for."""
    if name := _name_of(node):
        value = holes[name]
        return ast.Name(value) if isinstance(value, str) and isinstance(node, ast.AST) else value
    if isinstance(node, list):
        items = [_fill(item, holes) for item in node]
        return [part for item in items for part in (item if isinstance(item, list) else [item])]
    if not isinstance(node, ast.AST):
        return node
    values = {name: _fill(value, holes) for name, value in ast.iter_fields(node)}
    if isinstance(node, ast.Call):
        every = values["args"] + values["keywords"]
        values["args"] = [item for item in every if not isinstance(item, ast.keyword)]
        values["keywords"] = [item for item in every if isinstance(item, ast.keyword)]
    return type(node)(**values)


# --- other languages ------------------------------------------------------------------------------------------------------


@functools.cache
def _expression(pattern):
    """Return a pattern as a regular expression: its tokens, with spaces and comments between them."""
    forms, holes = [], set()
    for token in TOKEN.findall(pattern):
        name = "rest" if token == "..." else token[1:] if token.startswith("$") else ""
        form = f"(?P={name})" if name in holes else f"(?P<{name}>{ANY if name == 'rest' else WORD})"
        forms.append(form if name else re.escape(token))
        holes.add(name)
    return re.compile(GAP.join(forms), re.DOTALL)


def _edit_tokens(text, pattern, replacement):
    for match in _expression(pattern).finditer(text):
        new = re.sub(r"\$(\w+)|\.\.\.", lambda hole, match=match: match[hole[1] or "rest"], replacement)
        yield Edit(*(len(text[:at].encode()) for at in match.span()), new)
