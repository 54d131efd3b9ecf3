"""What a replay found: figures by tier as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtier.replay.serve import Counts

GIB = 1 << 30
_NONE = "-"


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier's figures. `load_*` is towards the GPU, `store_*` away from it; `hits` counts blocks.

    `mode` says how the tier does its I/O.
    """

    hits: int
    load_bytes: int
    load_seconds: float
    store_bytes: int
    store_seconds: float
    evictions: int
    dropped: Mapping[str, int]
    used_bytes: int
    peak_bytes: int
    capacity_bytes: int
    mode: str = ""

    def to_json(self) -> dict[str, object]:
        """The figures as they stand in the JSON report; `dropped` is the sum over the reasons."""
        return {
            "hits": self.hits,
            "load_bytes": self.load_bytes,
            "load_seconds": round(self.load_seconds, 6),
            "store_bytes": self.store_bytes,
            "store_seconds": round(self.store_seconds, 6),
            "evictions": self.evictions,
            "dropped": sum(self.dropped.values()),
            "dropped_reasons": dict(sorted(self.dropped.items())),
            "used_bytes": self.used_bytes,
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            "mode": self.mode,
        }


@dataclass(frozen=True, slots=True, eq=False)
class ReplayReport:
    """A whole replay. `tiers` go from the GPU down, `recovered_blocks` were in them at the start.

    `settings` repeat what was asked and found; `wrong` describes the first wrong pages.
    """

    counts: Counts
    tiers: Mapping[str, TierReport]
    seconds: float
    recovered_blocks: int = 0
    settings: Mapping[str, object] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True when every byte was right."""
        return not self.counts.mismatched

    def to_json(self) -> dict[str, object]:
        """The report for programs."""
        counts = self.counts
        return {
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "settings": dict(self.settings),
            "requests": counts.requests,
            "prompt_tokens": counts.prompt_tokens,
            "hit_tokens": {name: counts.hit_tokens.get(name, 0) for name in self._names()},
            "blocks": {
                "stored": counts.stored,
                "loaded": counts.loaded,
                "verified": counts.verified,
                "mismatched": counts.mismatched,
                "dropped": counts.dropped,
                "load_failed": counts.load_failed,
                "gpu_verified": counts.gpu_verified,
                "computed": counts.computed,
                "longest_load": counts.longest_load,
                "recovered": self.recovered_blocks,
                "loaded_of_recovered": counts.earlier,
            },
            "block_references": counts.block_references,
            "block_hits": counts.block_hits,
            "block_hit_rate": round(self.block_hit_rate, 6),
            "tiers": {name: tier.to_json() for name, tier in self.tiers.items()},
            "wrong": list(self.wrong),
        }

    @property
    def block_hit_rate(self) -> float:
        """Blocks of requests in the longest prefix the tiers below the GPU held, as a share of all."""
        return self.counts.block_hits / self.counts.block_references if self.counts.block_references else 0.0

    def show(self, console: Console) -> None:
        """Print the table by tier, what was verified, and each wrong page that was kept."""
        counts = self.counts
        console.print(self._table())
        console.print(
            "; ".join(f"{escape(name)}: {escape(tier.mode)}" for name, tier in self.tiers.items() if tier.mode)
        )
        hit = sum(counts.hit_tokens.values())
        console.print(
            f"{counts.requests:,} requests, {counts.prompt_tokens:,} prompt tokens, {hit:,} hit "
            f"({_share(hit, counts.prompt_tokens)}), in {self.seconds:.1f} s. Blocks: {counts.stored:,} stored, "
            f"{counts.loaded:,} loaded, {counts.verified:,} verified, {counts.mismatched:,} mismatched; "
            f"{counts.gpu_verified:,} verified in place on the GPU."
        )
        if self.recovered_blocks:
            console.print(
                f"{self.recovered_blocks:,} blocks of an earlier run were there at the start; {counts.earlier:,} loads "
                f"were of blocks this run had not stored."
            )
        if counts.dropped or counts.load_failed:
            console.print(f"{counts.dropped:,} stores dropped, {counts.load_failed:,} loads ended as misses.")
        for line in self.wrong:
            console.print(f"[red]wrong bytes:[/red] {escape(line)}", soft_wrap=True)
        verdict = "[green]every byte right[/green]" if self.ok else "[bold red]WRONG BYTES[/bold red]"
        console.print(f"Verdict: {verdict}.")

    def _names(self) -> Iterable[str]:
        return dict.fromkeys([*self.tiers, *self.counts.hit_tokens])

    def _table(self) -> Table:
        table = Table(title="Replay by tier", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("tier", no_wrap=True, min_width=4)
        for column in ("hit tokens", "loaded", "stored", "evicted", "dropped", "used of bound"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, tier in self.tiers.items():
            tokens = self.counts.hit_tokens.get(name, 0)
            table.add_row(
                escape(name),
                f"{tokens:,}\n{_share(tokens, self.counts.prompt_tokens)}",
                f"{_size(tier.load_bytes)}\n{_rate(tier.load_bytes, tier.load_seconds)}",
                f"{_size(tier.store_bytes)}\n{_rate(tier.store_bytes, tier.store_seconds)}",
                f"{tier.evictions:,}",
                f"{sum(tier.dropped.values()):,}",
                f"{_size(tier.used_bytes)}\n{_size(tier.capacity_bytes)}",
            )
        return table


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else _NONE


def _rate(moved_bytes: int, seconds: float) -> str:
    return f"{moved_bytes / seconds / GIB:.2f} GiB/s" if moved_bytes and seconds > 0 else ""


def _size(size_bytes: int) -> str:
    if not size_bytes:
        return _NONE
    value, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
