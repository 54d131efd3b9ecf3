"""The result of a replay: figures by tier, as a table and as JSON."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.markup import escape

from kvtier.cli.terminal import table
from kvtier.options import size_text
from kvtier.stack import TierStats
from kvtier.tools.replay.serve import Counts

GIB = 1 << 30
COLUMNS = ("tier", "hit tokens", "loaded", "stored", "evicted", "dropped", "used of bound")
_NONE = "-"


_BLOCK_COUNTS = (
    *("stored", "loaded", "verified", "mismatched", "dropped", "load_failed", "gpu_verified", "computed"),
    "longest_load",
)


@dataclass(frozen=True, slots=True, eq=False)
class ReplayReport:
    """A whole replay. `tiers` go from the GPU down, `recovered_blocks` were in them at the start.

    Those of a service are of all its engines.
    `settings` hold the options and what followed from them; `wrong` describes the first wrong pages.
    """

    counts: Counts
    tiers: Mapping[str, TierStats]
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
            "blocks": {name: getattr(counts, name) for name in _BLOCK_COUNTS}
            | {"recovered": self.recovered_blocks, "loaded_of_recovered": counts.earlier},
            "block_references": counts.block_references,
            "block_hits": counts.block_hits,
            "block_hit_rate": round(self.block_hit_rate, 6),
            "tiers": {name: tier_json(tier) for name, tier in self.tiers.items()},
            "wrong": list(self.wrong),
        }

    @property
    def block_hit_rate(self) -> float:
        """Blocks of requests in the longest prefix the tiers below the GPU held, as a share of all."""
        return self.counts.block_hits / self.counts.block_references if self.counts.block_references else 0.0

    def show(self, console: Console) -> None:
        """Print the table by tier, what was verified, and each wrong page that was kept."""
        counts = self.counts
        console.print(table(COLUMNS, self.rows(), title="Replay by tier"))
        console.print(
            "; ".join(f"{escape(name)}: {escape(tier.mode)}" for name, tier in self.tiers.items() if tier.mode)
        )
        if "service" in self.settings:
            console.print("Below the GPU the figures of tiers are of all engines of the service.")
        console.print(self.summary())
        if self.recovered_blocks:
            console.print(
                f"{self.recovered_blocks:,} blocks were there at the start; {counts.earlier:,} loads were of blocks "
                f"that this run had not stored."
            )
        if counts.dropped or counts.load_failed:
            console.print(f"{counts.dropped:,} stores dropped, {counts.load_failed:,} loads ended as misses.")
        for line in self.wrong:
            console.print(f"[red]wrong bytes:[/red] {escape(line)}", soft_wrap=True)
        verdict = "[green]every byte right[/green]" if self.ok else "[bold red]WRONG BYTES[/bold red]"
        console.print(f"Verdict: {verdict}.")

    def summary(self) -> str:
        """Requests, hits, time, and what was verified, in a line."""
        counts = self.counts
        hit = sum(counts.hit_tokens.values())
        return (
            f"{counts.requests:,} requests, {counts.prompt_tokens:,} prompt tokens, {hit:,} hit "
            f"({_share(hit, counts.prompt_tokens)}), in {self.seconds:.1f} s. Blocks: {counts.stored:,} stored, "
            f"{counts.loaded:,} loaded, {counts.verified:,} verified, {counts.mismatched:,} mismatched; "
            f"{counts.gpu_verified:,} verified in place on the GPU."
        )

    def _names(self) -> Iterable[str]:
        return dict.fromkeys([*self.tiers, *self.counts.hit_tokens])

    def rows(self) -> Iterator[tuple[str, ...]]:
        """A row of text for each tier, with the columns COLUMNS."""
        for name, tier in self.tiers.items():
            tokens = self.counts.hit_tokens.get(name, 0)
            yield (
                name,
                f"{tokens:,}\n{_share(tokens, self.counts.prompt_tokens)}",
                f"{size_or_none(tier.load_bytes)}\n{_rate(tier.load_bytes, tier.load_seconds)}",
                f"{size_or_none(tier.store_bytes)}\n{_rate(tier.store_bytes, tier.store_seconds)}",
                f"{tier.evictions:,}",
                f"{sum(tier.dropped.values()):,}",
                f"{size_or_none(tier.used_bytes)}\n{size_or_none(tier.capacity_bytes)}",
            )


def tier_json(tier: TierStats) -> dict[str, object]:
    """A tier's figures as they stand in the JSON report; `dropped` is the sum over the reasons."""
    seconds = {"load_seconds": round(tier.load_seconds, 6), "store_seconds": round(tier.store_seconds, 6)}
    dropped = {"dropped": sum(tier.dropped.values()), "dropped_reasons": dict(sorted(tier.dropped.items()))}
    return asdict(tier) | seconds | dropped


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else _NONE


def _rate(moved_bytes: int, seconds: float) -> str:
    return f"{moved_bytes / seconds / GIB:.2f} GiB/s" if moved_bytes and seconds > 0 else ""


def size_or_none(size_bytes: int) -> str:
    """A size for people; a dash for none."""
    return size_text(size_bytes) if size_bytes else _NONE
