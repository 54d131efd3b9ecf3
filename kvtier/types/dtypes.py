"""Element types of KV caches: one name for each, whichever of the usual spellings is given."""

AUTO = "auto"
"""The engine's default type. A layout, which needs a size, takes `AUTO_DTYPE` for it."""
AUTO_DTYPE = "bfloat16"
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}
_SPELLINGS = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def canonical_dtype(name: str) -> str:
    """The one name of an element type: `bf16`, `torch.bfloat16` and `BFloat16` are `bfloat16`. Other names stay as they
    are, in lower case."""
    plain = name.strip().lower().removeprefix("torch.")
    return _SPELLINGS.get(plain, plain)


def dtype_bytes(name: str) -> int:
    """Bytes of one element. Raises ValueError, which names the known types, for any other."""
    dtype = canonical_dtype(name)
    size = DTYPE_BYTES.get(AUTO_DTYPE if dtype == AUTO else dtype)
    if size is None:
        raise ValueError(f"{name[:40]!r} is no known dtype; known are {', '.join((AUTO, *DTYPE_BYTES, *_SPELLINGS))}")
    return size
