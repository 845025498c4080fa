"""Architectures of other packages with answers that were read in their code, and the program that compares `inspect` with them.

`answer.py` has the form of a package, `answers/` one file for each, `packages.py` their environments, `support/judge.py` compares an
inspection with an answer, `examine.py` examines the models of one package, and `run.py` all of them (`make zoo`).
"""
