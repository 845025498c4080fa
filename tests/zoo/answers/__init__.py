"""Answers by hand, one file for each package: models, inputs, streams, and the lines of code in which the streams were read."""
