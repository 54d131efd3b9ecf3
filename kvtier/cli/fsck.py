"""`kvtier fsck`: verify every block of a store, and repair it on request."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import click

from kvtier.cli.stores import (
    StoreAddress,
    json_option,
    parts_text,
    print_columns,
    print_json,
    root_argument,
    store_arguments,
    store_at,
)
from kvtier.cli.terminal import progress
from kvtier.options import count_text, size_text
from kvtier.tier.inspection import Access, CheckStep, Finding, FindingKind, StoreAbout

DAMAGED = 1
_TOTALS = ("slots", "whole", "empty", "payload_bytes")


@dataclass(slots=True)
class Report:
    """The findings of a check: counts of everything, and the first `limit` findings of each kind."""

    limit: int
    totals: Counter[str] = field(default_factory=Counter)
    counts: Counter[tuple[FindingKind, str]] = field(default_factory=Counter)
    repaired: Counter[tuple[FindingKind, str]] = field(default_factory=Counter)
    findings: dict[FindingKind, list[Finding]] = field(default_factory=dict)

    def add(self, step: CheckStep) -> None:
        """Take one step of a check in."""
        self.totals.update({name: getattr(step, name) for name in _TOTALS})
        for finding in step.findings:
            self.counts[finding.kind, finding.reason] += 1
            self.repaired[finding.kind, finding.reason] += finding.repaired
            kept = self.findings.setdefault(finding.kind, [])
            if len(kept) < self.limit:
                kept.append(finding)

    @property
    def damaged(self) -> int:
        """Damaged things that are damaged still."""
        left = self.counts - self.repaired
        return sum(count for (kind, _), count in left.items() if kind.is_damage)

    @property
    def kept(self) -> list[Finding]:
        """The findings that were kept, damage first."""
        return [finding for kind in FindingKind for finding in self.findings.get(kind, ())]

    def rows(self) -> list[dict[str, Any]]:
        """The counts of each kind and reason, damage first: found, and repaired."""
        names, order = ("kind", "reason", "damage", "count", "repaired"), list(FindingKind)
        ordered = sorted(self.counts, key=lambda found: (order.index(found[0]), found[1]))
        rows = ((*found, found[0].is_damage, self.counts[found], self.repaired[found]) for found in ordered)
        return [dict(zip(names, row, strict=True)) for row in rows]

    @property
    def left_out(self) -> int:
        """The number of findings that were counted only."""
        return self.counts.total() - len(self.kept)

    def document(self) -> dict[str, Any]:
        """The report for programs."""
        return {
            "damaged": self.damaged,
            **{name: self.totals[name] for name in _TOTALS},
            "counts": self.rows(),
            "findings": [finding._asdict() for finding in self.kept],
            "findings_left_out": self.left_out,
        }


@click.command(short_help="Verify every block of a store.")
@root_argument
@store_arguments
@click.option("--repair", is_flag=True, help="Make damaged blocks empty and mend the store's own records.")
@click.option("--online", is_flag=True, help="Check beside the process that owns ROOT, locking nothing.")
@click.option("--limit", type=click.IntRange(0), default=20, metavar="N", help="Findings shown of each kind.")
@json_option
def fsck(where: StoreAddress, repair: bool, online: bool, limit: int, as_json: bool) -> None:
    """Verify every block of ROOT: its header, its place, its key, its payload's checksum.

    Reads only, unless --repair is given. Exits with 0 if nothing is damaged (any more), with 1 if something is, with 2
    if the store cannot be checked: owned by a process, no permission, no store. A store that processes share is
    checked beside them, and with --online one that a process owns is as well: what it writes meanwhile is not damage.
    """
    if repair and online:
        raise click.UsageError("--repair needs the store for itself, so it goes without --online")
    report = Report(limit)
    access = Access.CHANGE if repair else Access.READ if online else Access.CHECK
    with store_at(where, access) as store:
        about = store.about
        with progress("checking", about.slots) as advance:
            for step in store.check(repair):
                report.add(step)
                advance(step.slots)
    if as_json:
        print_json("fsck", about, report.document())
    else:
        _show(about, report)
    if report.damaged:
        raise click.exceptions.Exit(DAMAGED)


def _show(about: StoreAbout, report: Report) -> None:
    summary = [f"{about.root}: {about.layout}", parts_text(about)]
    if about.session is not None:
        summary += [f"session {about.session}", "closed in order" if about.clean else "not closed in order"]
    click.echo(", ".join(summary))
    slots, whole, empty, payload_bytes = (report.totals[name] for name in _TOTALS)
    click.echo(
        f"{count_text(slots)} slots: {count_text(whole)} whole ({size_text(payload_bytes)} verified), "
        f"{count_text(empty)} empty"
    )
    if report.counts:
        cells = [
            {"found": row["kind"], "reason": row["reason"], "damage": "yes" if row["damage"] else "no"}
            | {name: count_text(row[name]) for name in ("count", "repaired")}
            for row in report.rows()
        ]
        print_columns(cells, left=3)
    for finding in report.kept:
        click.echo(f"{finding.kind}: {finding.where}: {finding.reason}{' (repaired)' if finding.repaired else ''}")
    if report.left_out:
        click.echo(f"... and {count_text(report.left_out)} more; --limit shows more of them")
    for note in about.notes:
        click.echo(f"note: {note}")
    if report.damaged:
        click.echo(f"DAMAGED: {count_text(report.damaged)}; nothing of it will be loaded, --repair clears it away")
    else:
        click.echo("not damaged")
