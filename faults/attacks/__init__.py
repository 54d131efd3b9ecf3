"""One module for each kind of fault; each has `ATTACKS`, a tuple of `Attack`. A new module here is found without being
registered."""
