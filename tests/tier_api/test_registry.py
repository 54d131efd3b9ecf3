"""Backends are found by entry points; what is ambiguous, unknown or broken is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import support_backends
from support_backends import STANDARD, Idle, add_distribution, backends_in

from kvtier.errors import ConfigError
from kvtier.tier import registry
from kvtier.tier.registry import discover


def test_a_backend_is_found_by_its_type_name(tmp_path: Path) -> None:
    add_distribution(tmp_path, "plugin", STANDARD)
    backends = backends_in(tmp_path)
    assert backends.names == ("cpu", "disk", "gpu", "probed")
    assert backends.get("gpu") is support_backends.GPUTier
    assert backends.get("disk") is support_backends.DiskTier


def test_installed_distributions_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_distribution(tmp_path, "third-party-tier", {"third": "support_backends:Idle"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert discover().get("third") is Idle


def test_the_backends_of_this_distribution_are_installed() -> None:
    assert {"gpu", "cpu", "fs", "shared_fs", "valkey", "s3", "gcs", "azure"} <= set(discover().names)


def test_an_unknown_type_lists_the_known_ones_and_suggests_the_nearest(tmp_path: Path) -> None:
    add_distribution(tmp_path, "plugin", STANDARD)
    with pytest.raises(ConfigError, match=r"'dsik'; did you mean 'disk'\? \(known: cpu, disk, gpu, probed\)"):
        backends_in(tmp_path).get("dsik")


def test_with_nothing_installed_the_message_says_so() -> None:
    with pytest.raises(ConfigError, match="none is installed"):
        backends_in().get("cpu")


def test_a_name_that_two_distributions_claim_is_refused_naming_both(tmp_path: Path) -> None:
    add_distribution(tmp_path, "tier-one", {"s3": "support_backends:Idle"})
    add_distribution(tmp_path, "tier-two", {"s3": "support_backends:DiskTier", "ok": "support_backends:Idle"}, "2.5")
    backends = backends_in(tmp_path)
    with pytest.raises(ConfigError, match=r"'s3' is claimed by tier-one 1\.0 and tier-two 2\.5; uninstall"):
        backends.get("s3")
    assert backends.get("ok") is Idle


def test_two_distributions_that_claim_the_same_class_are_refused_as_well(tmp_path: Path) -> None:
    add_distribution(tmp_path, "tier-one", {"s3": "support_backends:Idle"})
    add_distribution(tmp_path, "tier-two", {"s3": "support_backends:Idle"})
    with pytest.raises(ConfigError, match="claimed by"):
        backends_in(tmp_path).get("s3")


def test_one_distribution_seen_twice_on_the_path_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for site in ("a", "b"):
        add_distribution(tmp_path / site, "plugin", {"third": STANDARD["gpu"]})
        monkeypatch.syspath_prepend(str(tmp_path / site))
    assert discover().get("third") is support_backends.GPUTier


def test_the_installed_distributions_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    discover()
    monkeypatch.setattr(registry, "entry_points", lambda **_: pytest.fail("searched again"))
    assert {"gpu", "cpu", "fs", "shared_fs", "valkey", "s3", "gcs", "azure"} <= set(discover().names)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module:Tier", "cannot be loaded: ModuleNotFoundError"),
        ("support_backends:NoSuchClass", "cannot be loaded: AttributeError"),
        ("raises_at_import:Tier", "cannot be loaded: RuntimeError: no driver here"),
        ("support_backends:not_a_class", "is no subclass of kvtier.tier.contract.LoadStore"),
        ("pathlib:Path", "is no subclass of kvtier.tier.contract.LoadStore"),
        ("support_backends:Abstract", "leaves close, load, open, store abstract"),
        ("support_backends:NoOptions", "has no Options"),
        ("support_backends:NoMedium", "names no medium"),
        ("support_backends:BadAlignment", "BLOCK_SIZE_ALIGNMENT of 0"),
    ],
)
def test_a_broken_backend_is_refused_naming_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, reason: str
) -> None:
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('no driver\\nhere')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    add_distribution(tmp_path, "broken-tier", {"broken": value, "gpu": STANDARD["gpu"]})
    backends = backends_in(tmp_path)
    with pytest.raises(ConfigError) as caught:
        backends.get("broken")
    assert "the backend 'broken' of broken-tier 1.0" in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert backends.get("gpu") is support_backends.GPUTier


def test_nothing_is_loaded_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "writes_at_import.py").write_text(
        f"open({str(tmp_path / 'loaded')!r}, 'w').close()\nfrom support_backends import Idle\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    add_distribution(tmp_path, "lazy", {"lazy": "writes_at_import:Idle"})
    backends = backends_in(tmp_path)
    assert backends.names == ("lazy",)
    assert not (tmp_path / "loaded").exists()
    backends.get("lazy")
    assert (tmp_path / "loaded").exists()
