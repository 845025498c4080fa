"""The model behind a name on the command line."""
