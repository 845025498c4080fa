"""Run the command line as `python -m addnorm.cli`."""

from addnorm.cli import main

main(prog_name="addnorm")
