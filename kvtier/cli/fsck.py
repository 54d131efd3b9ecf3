"""`kvtier fsck`: verify every block of a store, and repair it on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import click

from kvtier.cli.failing import OneLineErrors
from kvtier.cli.stores import (
    about_json,
    json_option,
    note_owner,
    parts_text,
    print_columns,
    print_json,
    progress,
    root_argument,
    store_at,
)
from kvtier.cli.text import count_text, size_text
from kvtier.inspection import Access, Checked, Finding, FindingKind, StoreAbout

DAMAGED = 1


@dataclass(slots=True)
class Report:
    """What a check found: counts of everything, and the first `limit` findings of each kind."""

    limit: int
    slots: int = 0
    empty: int = 0
    whole: int = 0
    payload_bytes: int = 0
    counts: Counter[tuple[FindingKind, str]] = field(default_factory=Counter)
    repaired: Counter[tuple[FindingKind, str]] = field(default_factory=Counter)
    findings: dict[FindingKind, list[Finding]] = field(default_factory=dict)

    def add(self, step: Checked) -> None:
        """Take one step of a check in."""
        self.slots += step.slots
        self.empty += step.empty
        self.whole += step.whole
        self.payload_bytes += step.payload_bytes
        for finding in step.findings:
            self.counts[finding.kind, finding.reason] += 1
            self.repaired[finding.kind, finding.reason] += finding.repaired
            kept = self.findings.setdefault(finding.kind, [])
            if len(kept) < self.limit:
                kept.append(finding)

    @property
    def damaged(self) -> int:
        """Damaged things that are damaged still."""
        return _of_damage(self.counts) - _of_damage(self.repaired)

    @property
    def kept(self) -> list[Finding]:
        """The findings that were kept, damage first."""
        return [finding for kind in FindingKind for finding in self.findings.get(kind, ())]

    @property
    def left_out(self) -> int:
        """How many findings were counted only."""
        return self.counts.total() - len(self.kept)


def _of_damage(counts: Counter[tuple[FindingKind, str]]) -> int:
    return sum(count for (kind, _), count in counts.items() if kind.is_damage)


@click.command(cls=OneLineErrors, short_help="Verify every block of a store on disk.")
@root_argument
@click.option("--repair", is_flag=True, help="Make damaged blocks empty and mend the store's own records.")
@click.option(
    "--limit", type=click.IntRange(0), default=20, show_default=True, metavar="N", help="Findings shown of each kind."
)
@json_option
def fsck(root: str, repair: bool, limit: int, as_json: bool) -> None:
    """Verify every block of ROOT: its header, its place, its key, its payload's checksum.

    Reads only, unless --repair is given. Exits with 0 if nothing is damaged (any more), with 1 if something is, with 2
    if the store cannot be checked: owned by a process, no permission, no store. A store that processes share is
    checked beside them.
    """
    report = Report(limit)
    with store_at(root, Access.CHANGE if repair else Access.CHECK) as store:
        about = store.about
        note_owner(about)
        with progress("checking", about.slots) as advance:
            for step in store.check(repair):
                report.add(step)
                advance(step.slots)
    if as_json:
        print_json(_document(about, report))
    else:
        _show(about, report)
    if report.damaged:
        raise click.exceptions.Exit(DAMAGED)


def _document(about: StoreAbout, report: Report) -> dict[str, Any]:
    return about_json("fsck", about) | {
        "damaged": report.damaged,
        "slots": report.slots,
        "whole": report.whole,
        "empty": report.empty,
        "payload_bytes": report.payload_bytes,
        "counts": [
            {
                "kind": kind.value,
                "reason": reason,
                "damage": kind.is_damage,
                "count": count,
                "repaired": report.repaired[kind, reason],
            }
            for (kind, reason), count in _sorted(report.counts)
        ],
        "findings": [
            {
                "kind": finding.kind.value,
                "reason": finding.reason,
                "where": finding.where,
                "repaired": finding.repaired,
            }
            for finding in report.kept
        ],
        "findings_left_out": report.left_out,
    }


def _sorted(counts: Counter[tuple[FindingKind, str]]) -> Iterable[tuple[tuple[FindingKind, str], int]]:
    order = list(FindingKind)
    return sorted(counts.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))


def _show(about: StoreAbout, report: Report) -> None:
    told = [f"{about.root}: {about.layout}", parts_text(about)]
    if about.session is not None:
        told += [f"session {about.session}", "closed in order" if about.clean else "not closed in order"]
    click.echo(", ".join(told))
    click.echo(
        f"{count_text(report.slots)} slots: {count_text(report.whole)} whole ({size_text(report.payload_bytes)} "
        f"verified), {count_text(report.empty)} empty"
    )
    if report.counts:
        rows = [
            (kind.value, reason, "yes" if kind.is_damage else "no", count_text(count), _repaired(report, kind, reason))
            for (kind, reason), count in _sorted(report.counts)
        ]
        print_columns(("found", "reason", "damage", "count", "repaired"), rows, left=3)
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


def _repaired(report: Report, kind: FindingKind, reason: str) -> str:
    return count_text(report.repaired[kind, reason])
