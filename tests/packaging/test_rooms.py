"""The rooms of `kvtier`, which are what `ls kvtier` shows, and the arrows between them, which are imports."""

from __future__ import annotations

import ast
from collections import Counter

from support_paths import PROJECT

KVTIER = PROJECT / "kvtier"
ABOVE_THE_CORE = {"tools", "engines"}
FACES = {"__init__", "integrations"}
"""They hand on what others have: the public names, and a former place."""
ROOMS_MAX, ARROWS_MAX = 20, 90
CORE_ROOMS_MAX, CORE_ARROWS_MAX = 18, 62
ROOM_SHARE_MAX = 0.25
"""Of the wheel's lines."""


def rooms() -> dict[str, list[str]]:
    """The source of each room's files."""
    entries = [entry for entry in sorted(KVTIER.iterdir()) if entry.suffix == ".py" or (entry / "__init__.py").exists()]
    return {
        entry.stem: [file.read_text() for file in (entry.rglob("*.py") if entry.is_dir() else [entry])]
        for entry in entries
    }


def imported_rooms(source: str) -> set[str]:
    """The rooms that a file imports from, also late or for types alone."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {parts[1] for name in names if (parts := name.split("."))[0] == "kvtier" and len(parts) > 1}
    return found


def test_rooms_and_arrows_stay_few(capsys):
    sources = rooms()
    arrows = {
        (room, other)
        for room, files in sources.items()
        for other in set().union(*map(imported_rooms, files)) & set(sources)
        if other != room and room not in FACES
    }
    core = {arrow for arrow in arrows if not ABOVE_THE_CORE & set(arrow)}
    with capsys.disabled():
        print(f"\n{len(sources)} rooms, {len(arrows)} arrows; without tools and engines", end=" ")
        print(f"{len(sources) - len(ABOVE_THE_CORE)}, {len(core)}")
    assert len(sources) <= ROOMS_MAX
    assert len(arrows) <= ARROWS_MAX
    assert len(sources) - len(ABOVE_THE_CORE) <= CORE_ROOMS_MAX
    assert len(core) <= CORE_ARROWS_MAX
    assert not [arrow for arrow in arrows if arrow[::-1] in arrows]
    assert not [arrow for arrow in arrows if arrow[1] in ABOVE_THE_CORE]


def test_no_room_is_a_quarter_of_the_wheel():
    lines = Counter({room: sum(file.count("\n") for file in files) for room, files in rooms().items()})
    backends = sum(file.read_text().count("\n") for file in (PROJECT / "backends").rglob("*.py"))
    assert max(lines.values()) <= ROOM_SHARE_MAX * (sum(lines.values()) + backends), lines
