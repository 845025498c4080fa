"""All planted faults. The tests of an area must detect each of its faults, whatever the layout and the local names of the code."""

from mutants.operation_faults import OPERATION
from mutants.stack_faults import STACKS
from mutants.stream_faults import STREAMS
from mutants.tool_faults import TOOLS

AREAS = OPERATION | STACKS | STREAMS | TOOLS
