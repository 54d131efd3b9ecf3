"""Python imports this at its start in every process whose PYTHONPATH has this folder, those that SGLang spawns too."""

import cpu_engine  # noqa: F401
