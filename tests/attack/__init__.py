"""Random input for every compiled entry; see ``python -m tests.attack --help``."""
