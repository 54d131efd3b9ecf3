"""What keeps a tier on a server from opening: one line with its key, from the tier and from `kvtier check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from kvtier.cli import main
from kvtier.errors import ConfigError
from kvtier.testing.conformance.base import ConformanceBase
from kvtier_remote.options import RemoteOptions

OWN_SECRETS = ("sesame", "hunter2")
"""What tests use as a password or a key that no line may show."""


def checked(folder: Path, options: RemoteOptions, *words: str) -> Result:
    """`kvtier check` of a stack with a tier of these options below the CPU."""
    entry = options.model_dump(mode="json", exclude_unset=True) | {"type": options.type}
    stack = folder / "stack.yaml"
    tiers = [{"type": "gpu"}, {"type": "cpu", "cpu_bytes_to_use": "64MiB"}, entry]
    stack.write_text(yaml.safe_dump({"tiers": tiers}))
    return CliRunner().invoke(main, ["check", *words, str(stack)])


def check_refuses(folder: Path, options: RemoteOptions, key: str, *, unprobed: int = 0) -> str:
    """The one line with which `kvtier check --probe` ends, with 2. Without a probe the check ends with `unprobed`."""
    result = checked(folder, options, "--probe")
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: tiers[2].{key}: "), line
    assert not any(secret in result.output for secret in OWN_SECRETS), result.output
    assert checked(folder, options, "--no-probe").exit_code == unprobed
    return line


async def open_refuses(suite: ConformanceBase, folder: Path, key: str) -> str:
    """The one line with which a tier of this suite does not open."""
    with pytest.raises(ConfigError) as caught:
        async with suite.opened(folder):
            pass
    assert caught.value.path == key, caught.value
    line = str(caught.value)
    assert "\n" not in line
    assert not any(secret in line for secret in OWN_SECRETS), line
    return line


def private_file(path: Path, text: str) -> str:
    """A file with a secret, as options name one."""
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


Kinds = dict[str, tuple[dict[str, Any], str]]
"""By what is wrong: options that cannot work, and the key that the line must name."""
