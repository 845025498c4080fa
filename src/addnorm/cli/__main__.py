"""Run the command line as `python -m addnorm.cli`."""

from addnorm.cli.group import main

main(prog_name="addnorm")
