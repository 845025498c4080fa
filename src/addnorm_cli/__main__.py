"""Run the command line as `python -m addnorm_cli`."""

from addnorm_cli import main

main()
