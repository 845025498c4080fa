"""Run the command line as `python -m addnorm`."""

from addnorm_cli import main

main()
