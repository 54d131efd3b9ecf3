"""Something else in the place of a file: truncated, of another root or release, no file at all. A miss or a refusal."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier.types.jobs import JobKind
from kvtier.types.keys import OffloadKey, make_key

from ..attack import Budget, Tally
from . import plants
from .plants import PAGE, Plant, Scene
from .stored import HEADER, LAYOUTS, SLOT, Found, Stored, held, load, opened, run, stored

BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """One thing in the place of another. `missed`: `first` block, all in its `bucket`, `all`, `none` of them, `any`;
    `refused`: the root is, in words. Whatever is not missed must load."""

    layout: str
    name: str
    what: str
    plant: Plant
    missed: str = "first"


def _no_files(layout: str, name: str, missed: str, a_folder: str = "") -> list[Case]:
    """What is no plain file at all. `a_folder`: what is missed with a folder, which no file can replace."""
    kinds: tuple[tuple[str, Plant], ...] = (
        ("a link", plants.link),
        ("a link to a device", plants.device),
        ("a pipe", plants.pipe),
        ("a folder", plants.folder),
        ("a socket", plants.socket_file),
    )
    return [
        Case(layout, name, what, plant, a_folder or missed if plant is plants.folder else missed)
        for what, plant in kinds
    ]


def _slab_cases() -> list[Case]:
    slab, block, snapshot = "slab-00000", "superblock", "snapshot"
    cases = [case for name in (slab, block, "lock") for case in _no_files("slab", name, "refused")]
    cases += _no_files("slab", snapshot, "any")
    rows: tuple[tuple[str, str, Plant, str], ...] = (
        (slab, "truncated", plants.truncate, "any"),
        (slab, "empty", lambda scene, path: os.truncate(path, 0), "all"),
        (slab, "extended", plants.extend, "none"),
        (slab, "zeroed", plants.zero, "all"),
        (slab, "noise", plants.noise, "all"),
        (slab, "gone", lambda scene, path: path.unlink(), "all"),
        (slab, "another root's", plants.other_roots, "all"),
        (slab, "of others' mode", plants.mode(0o666), "none"),
        (slab, "of an older format", plants.version(-1), "all"),
        (slab, "of a newer format", plants.version(1), "all"),
        (slab, "another block in a slot", plants.another_block, "first"),
        (slab, "another payload in a slot", plants.another_payload, "first"),
        (slab, "another root's slot", plants.others_block, "first"),
        (slab, "another namespace's slot", plants.forge(namespace=b"x" * 16), "first"),
        (slab, "another epoch's slot", plants.forge(epoch=7), "first"),
        (slab, "another format's slot", plants.forge(region_generation=9), "first"),
        (slab, "another group's slot", plants.forge(key=make_key(b"k" * 32, 1), group=1), "first"),
        (slab, "a slot of an older format", plants.block_version(-1), "first"),
        (slab, "a slot of a newer format", plants.block_version(1), "first"),
        (slab, "a slot that was punched out", lambda scene, path: plants.poke(path, scene.at, bytes(SLOT)), "first"),
        (block, "truncated", lambda scene, path: os.truncate(path, scene.rng.randrange(PAGE)), "all"),
        (block, "truncated to one copy", lambda scene, path: os.truncate(path, PAGE), "none"),
        (block, "extended", plants.extend, "none"),
        (block, "zeroed", plants.zero, "all"),
        (block, "noise", plants.noise, "all"),
        (block, "gone", lambda scene, path: path.unlink(), "all"),
        (block, "another root's", plants.other_roots, "all"),
        (block, "of an older format", plants.version(-1), "refused"),
        (block, "of a newer format", plants.version(1), "refused"),
        (snapshot, "truncated", plants.truncate, "none"),
        (snapshot, "extended", plants.extend, "none"),
        (snapshot, "zeroed", plants.zero, "none"),
        (snapshot, "another root's", plants.other_roots, "none"),
        (snapshot, "of an older format", plants.version(-1, 0, 0), "none"),
        (snapshot, "of a newer format", plants.version(1, 0, 0), "none"),
        ("lock", "noise", plants.noise, "none"),
        (".", "a folder others may write into", plants.mode(0o777), "refused"),
        (".", "a folder that a pod's fsGroup may write into", plants.mode(0o2770), "none"),
        (".", "another user's folder", plants.owner, "refused"),
    )
    return cases + [Case("slab", *row) for row in rows]


def _files_cases() -> list[Case]:
    cases = _no_files("files", "block", "first")
    cases += _no_files("files", "superblock", "refused") + _no_files("files", "epoch", "all", a_folder="refused")
    cases += [case for name in ("account", "lock of the bucket") for case in _no_files("files", name, "none")]
    rows: tuple[tuple[str, str, Plant, str], ...] = (
        ("block", "truncated", plants.truncate, "first"),
        ("block", "truncated to its header", lambda scene, path: os.truncate(path, HEADER), "first"),
        ("block", "extended", plants.extend, "first"),
        ("block", "zeroed", plants.zero, "first"),
        ("block", "noise", plants.noise, "first"),
        ("block", "gone", lambda scene, path: path.unlink(), "first"),
        ("block", "in another bucket", plants.move_away, "first"),
        ("block", "another key's", plants.another_block, "first"),
        ("block", "a hard link to another", plants.hard_link, "first"),
        ("block", "another's payload", plants.another_payload, "first"),
        ("block", "another root's", plants.other_roots, "first"),
        ("block", "another namespace's", plants.forge(namespace=b"x" * 16), "first"),
        ("block", "another epoch's", plants.forge(epoch=7), "first"),
        ("block", "another group's", plants.forge(key=make_key(b"k" * 32, 1), group=1), "first"),
        ("block", "of an older format", plants.block_version(-1), "first"),
        ("block", "of a newer format", plants.block_version(1), "first"),
        ("block", "of others' mode", plants.mode(0o666), "none"),
        ("block", "of another owner", plants.owner, "none"),
        ("superblock", "truncated", lambda scene, path: os.truncate(path, scene.rng.randrange(1, PAGE)), "refused"),
        ("superblock", "truncated to one copy", lambda scene, path: os.truncate(path, PAGE), "none"),
        ("superblock", "extended", plants.extend, "none"),
        ("superblock", "zeroed", plants.zero, "refused"),
        ("superblock", "noise", plants.noise, "refused"),
        ("superblock", "another root's", plants.other_roots, "all"),
        ("superblock", "of an older format", plants.version(-1), "refused"),
        ("superblock", "of a newer format", plants.version(1), "refused"),
        ("epoch", "truncated", lambda scene, path: os.truncate(path, scene.rng.randrange(1, 128)), "all"),
        ("epoch", "zeroed", plants.zero, "all"),
        ("epoch", "noise", plants.noise, "all"),
        ("epoch", "of another format", plants.epoch_version, "refused"),
        ("account", "truncated", plants.truncate, "none"),
        ("account", "noise", plants.noise, "none"),
        ("account", "gone", lambda scene, path: path.unlink(), "none"),
        ("bucket-00", "a file", plants.plain_file, "bucket"),
        ("bucket-00", "a link", plants.link, "bucket"),
        ("bucket-00", "gone", lambda scene, path: shutil.rmtree(path), "bucket"),
        ("epochs", "a file", plants.plain_file, "refused"),
        ("epochs", "a link", plants.link, "refused"),
        ("leases", "a link", plants.link, "refused"),
        ("leases/" + "0" * 16, "a pipe", plants.pipe, "none"),
        ("bucket-00/new-" + "0" * 16 + "-1", "a pipe", plants.pipe, "none"),
        (".", "a folder others may write into", plants.mode(0o777), "refused"),
        (".", "a folder that a pod's fsGroup may write into", plants.mode(0o2770), "none"),
        (".", "another user's folder", plants.owner, "refused"),
    )
    return cases + [Case("files", *row) for row in rows]


CASES = (*_slab_cases(), *_files_cases())


def wrong_file(budget: Budget) -> Tally:
    """Each case in a root as it was written; then the next, each time from another seed."""
    tally = Tally()
    roots = {layout: stored(layout, budget.folder / layout / "root", BLOCKS) for layout in LAYOUTS}
    others = {layout: stored(layout, budget.folder / layout / "other", BLOCKS) for layout in LAYOUTS}
    for number in range(budget.count):
        case = CASES[number % len(CASES)]
        if case.plant is plants.owner and os.geteuid() != 0:
            continue
        rng = random.Random(f"{number}/{budget.seed}")
        attack_with(tally, case, Scene(roots[case.layout], others[case.layout], budget.folder / "victim", rng))
        tally.iterations += 1
        tally.notes[f"{case.layout}: {case.missed}"] += 1
    return tally


def attack_with(tally: Tally, case: Case, scene: Scene) -> None:
    """One case, in a root that is as it was written, before and afterwards."""
    plants.remove(scene.victim)
    scene.victim.write_bytes(b"precious")
    _one(tally, case, scene)
    renew(scene.root)


def renew(root: Stored) -> None:
    """Make a root anew as it was written."""
    with suppress(FileNotFoundError):
        os.chown(root.root, os.geteuid(), -1)
    plants.remove(root.root)
    root.root.mkdir(mode=0o700)
    root.restore()


def _one(tally: Tally, case: Case, scene: Scene) -> None:
    path, where = scene.path(case.name), f"{case.layout}: {case.name}: {case.what}"
    case.plant(scene, path)
    victim, before = _contents(scene.victim), held()
    found = _found(scene.root)
    left = [now - was for now, was in zip(held(), before, strict=True)]
    tally.leaks += sum(max(0, more) for more in left)
    tally.expect(max(left) <= 0, f"{where}: {left} files and threads were left behind")
    tally.hangs += found.hung
    tally.wrong_bytes += len(found.wrong)
    tally.expect(not (found.hung or found.broken or found.wrong), f"{where}: {found}")
    tally.expect(_contents(scene.victim) == victim, f"{where}: what lies elsewhere was changed")
    if case.missed == "refused":
        tally.expect(bool(found.refused) and "\n" not in found.refused, f"{where}: was not refused")
    if case.missed in ("any", "refused"):
        return
    names = set(scene.root.names)
    missed = {"first": {scene.first}, "all": names, "none": set(), "bucket": _inside_bucket(scene.root, path)}[
        case.missed
    ]
    tally.wrong_bytes += len(found.loaded & missed)
    tally.expect(names - found.loaded == missed, f"{where}: missed {len(names - found.loaded)} of {BLOCKS}, {found}")


def _contents(path: Path) -> dict[str, bytes | None]:
    """A file, or a folder and what lies in it."""
    return {str(one): one.read_bytes() if one.is_file() else None for one in (path, *sorted(path.rglob("*")))}


def _inside_bucket(root: Stored, bucket: Path) -> set[OffloadKey]:
    return {key for key, (path, _) in root.places.items() if bucket in path.parents}


def _found(root: Stored) -> Found:
    """Open the root, load every block it may have, store another one and load that; close it."""
    found = Found()
    extra = make_key(b"one more block of thirty-two bytes", 0)

    async def work() -> None:
        async with opened(root.layout, root.root) as tier:
            known = await tier.known(root.names)
            await load(tier, known if root.layout == "slab" else root.names, found)
            (outcome,) = await tier.moved(JobKind.STORE, [extra])
            if outcome.ok:
                await load(tier, [extra], found)
                if extra not in found.loaded:
                    found.broken = "a block that was stored is not loaded"
                found.loaded.discard(extra)

    run(found, work)
    return found
