"""Small things that both halves share: checks of arguments, files that appear whole or not at all, statistics of runs."""
