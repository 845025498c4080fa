"""Write csrc/arguments.h from the schemas in src/addnorm/ops/schema.py: `python csrc/generate_arguments.py`."""

from pathlib import Path

from addnorm.ops import attend
from addnorm.ops.options import CASTINGS, GRADIENTS
from addnorm.ops.schema import ADD_NAMES, ARGUMENTS, DEFINITIONS
from addnorm.ops.streams import schema as streams

HEADER = Path(__file__).parent / "arguments.h"
LETTERS = {"Tensor": "T", "Optional[Tensor]": "t", "Optional[int]": "o", "List[Tensor]": "l"}

TOP = """\
// Made by csrc/generate_arguments.py from the schemas in src/addnorm/ops/schema.py: do not edit.
#pragma once

#include <cstdint>

namespace addnorm {

// Of each operator the indices of its arguments, and a signature with one letter for each: T tensor, t optional tensor, n number,
// o optional number, l list of tensors. kAddOptions is the index of the first option before the norm.
"""


def camel(name: str) -> str:
    """Return a snake_case name in CamelCase."""
    return "".join(part.capitalize() for part in name.split("_"))


def enumerators(names: tuple[str, ...]) -> str:
    """Return an enum's body, several enumerators a line."""
    lines, line = [], "   "
    for name in names:
        text = f" k{camel(name)},"
        if len(line) + len(text) > 118:
            lines.append(line)
            line = "   "
        line += text
    return "\n".join([*lines, line])


def header() -> str:
    """Return the text of csrc/arguments.h."""
    parts = [TOP]
    for op, arguments in ARGUMENTS.items():
        names = tuple(argument.name for argument in arguments)
        signature = "".join(LETTERS.get(str(argument.type), "n") for argument in arguments)
        parts.append(f"struct {camel(op)}Args {{\n  enum Index : int {{\n{enumerators(names)}\n  }};\n")
        if ADD_NAMES[0] in names:
            parts.append(f"  static constexpr int kAddOptions = k{camel(ADD_NAMES[0])};\n")
        parts.append(f'  static constexpr const char* kSignature = "{signature}";\n}};\n')
    parts.append("\n// Indices of the options before the norm, from the first of them.\n")
    parts.append(f"struct AddOptionArgs {{\n  enum Index : int {{\n{enumerators(ADD_NAMES)}\n  }};\n}};\n")
    parts.append("\n// Bits of grad_mask, in the order of the backward operators' outputs.\nenum GradBit : int64_t {\n")
    parts.append("".join(f"  k{camel(name)}Grad = {1 << bit},\n" for bit, name in enumerate(GRADIENTS)))
    parts.append(f"}};\nconstexpr int kGrads = {len(GRADIENTS)};\n")
    parts.append("constexpr int64_t kAllGrads = (int64_t{1} << kGrads) - 1;\n")
    parts.append("\n// Values of `casting`.\nenum Casting : int64_t {\n")
    parts.append("".join(f"  k{camel(name)}Casting = {value},\n" for name, value in CASTINGS.items()))
    parts.append(f"}};\nconstexpr int64_t kCastings = {len(CASTINGS)};\n")
    parts.append("\n// The operators' schemas, for a process without the Python package.\n")
    parts.append("constexpr const char* kSchemas[] = {\n")
    parts.append("".join(f'  "{schema}",\n' for schema in (*DEFINITIONS, *streams.DEFINITIONS, *attend.DEFINITIONS)))
    parts.append("};\n\n}  // namespace addnorm\n")
    return "".join(parts)


if __name__ == "__main__":
    HEADER.write_text(header())
