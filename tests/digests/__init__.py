"""
Digests of what small runs compute: whether two versions of this package do the same to the last bit.

Run by hand: ``python -m tests.digests --out FILE`` in each version on the same machine, then compare the two files. One line a
case: a name, and the SHA-256 of all parameters, optimizer states, logged values and predicted actions. Only names are imported
that users import. Digests differ between processors and between versions of torch and numba, so none are kept here.
"""
