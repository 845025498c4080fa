"""Code of the commands of `addnorm COMMAND`, each in its own file: `run` takes the command's options.

The options themselves, help and completion are in the package `addnorm_cli`, which imports a command's file when it runs.
`_model.py` contains the shared code of commands on a model, `_output.py` that for printing and for errors.

Results go to stdout (`--json` for programs), progress goes to stderr.
"""
