"""Search and replace by tokens: a pattern finds its place whatever the layout, and whatever names it leaves open.

A pattern is code with holes. `$x` is a name with its attributes, calls and subscripts, the same wherever the pattern
repeats it. `...` is the shortest text without a semicolon. The replacement repeats the holes; in it, `...` that begins a
subscript is Python's own. Line breaks, comments, the kind of quotes and a comma before a closing bracket do not matter;
`;` inside a pattern may be a line break.
"""

import functools
import re

TOKEN = re.compile(r"""\$?\w+|"[^"\n]*"|'[^'\n]*'|\.\.\.|\S""")
GAP = r"(?:\s|//[^\n]*\n|#[^\n]*\n|/\*.*?\*/)*"
HOLE = r"\b\w[\w.]*(?:\((?:[^()]|\([^()]*\))*\)|\[[^\[\]]*\])*"
REST = r"[^;]*?"
SCOPE = r"^( *)(?:def|class) {}\b.*?(?=^\1[\w@]|\Z)"


def find_matches(text, pattern, scope=""):
    """Yield all matches of a pattern in a text, or in its functions and classes of Python that are called `scope`."""
    areas = [area.span() for area in re.finditer(SCOPE.format(scope), text, re.M | re.S)] if scope else [(0, len(text))]
    for area in areas:
        yield from _compile(pattern).finditer(text, *area)


def replace(match, replacement):
    """Return the text of a match with the replacement in its place."""
    new = re.sub(r"\$(\w+)|(?<!\[)\.\.\.", lambda hole: match[hole[1] or "rest"], replacement)
    return match.string[: match.start()] + new + match.string[match.end() :]


@functools.cache
def _compile(pattern):
    """Return a pattern as a regular expression: its tokens, with spaces and comments between them."""
    forms, holes = [], set()
    for token in TOKEN.findall(pattern):
        name = "rest" if token == "..." else token[1:] if token.startswith("$") else ""
        if name:
            form = f"(?P={name})" if name in holes else f"(?P<{name}>{REST if name == 'rest' else HOLE})"
            holes.add(name)
        elif token[0] in "\"'" and len(token) > 1:
            form = f"[\"']{re.escape(token[1:-1])}[\"']"
        elif token in ")]};":
            form = ";?" if token == ";" else rf"(?:,{GAP})?\{token}"
        else:
            form = rf"\b{token}\b" if token.isidentifier() else re.escape(token)
        forms.append(form)
    if pattern.endswith(";"):
        forms[-1] = ";"
    return re.compile(GAP.join(forms), re.DOTALL)
