"""One module a kind of fault; each holds `ATTACKS`, a tuple of `Attack`. A new module here is found by itself."""
