"""Answers of a stack process to its operator: JSON documents, without keys, salts or contents.

An inquiry is the first and only message of a connection, by the user of the process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvtier.control.tiers.slot_table import SlotState
from kvtier.service.connected import Engine
from kvtier.service.crash_file import CrashFile
from kvtier.service.packing import pieces
from kvtier.service.pool import Pool
from kvtier.service.session import Session
from kvtier.service.wire import PROTOCOLS, Inquiry, InquiryAnswer, Refused
from kvtier.stack.watching.stats import StackStats, kvtier_version
from kvtier.stack.watching.stats_socket import VERSION

ANSWER_BYTES_MAX = 256 << 10
"""An answer fits into the buffer of its socket."""
ENGINES_SHOWN_MAX, TEXT_SHOWN_MAX = 64, 200


@dataclass(frozen=True, slots=True)
class Asked:
    """A stack process, as its operator asks for it."""

    pool: Pool | None
    engines: Sequence[Engine]
    stats: Callable[[], StackStats]
    crash: CrashFile | None


async def answers_to(inquiry: Inquiry, asked: Asked, user: int) -> Sequence[InquiryAnswer | Refused]:
    """The parts of the answer to an inquiry of a user, or its refusal."""
    if user != os.geteuid():
        return [Refused(f"only its own user {os.geteuid()} may ask it")]
    document = await _document_for(inquiry, asked)
    if document is None:
        return [Refused(f"nothing to {inquiry.what[:32]} here, or no engine has joined yet: ask again once one has")]
    *parts, last = pieces(json.dumps(document).encode())
    return [*(InquiryAnswer(part, last=False) for part in parts), InquiryAnswer(last)]


async def _document_for(inquiry: Inquiry, asked: Asked) -> dict[str, Any] | None:
    """None for an inquiry that cannot be answered."""
    pool, what = asked.pool, inquiry.what
    if what == "ping":
        return state_of(pool)
    if what == "status":
        return status_of(pool)
    if what == "engines":
        return engines_of(pool, {engine.session: engine.engine_id for engine in asked.engines})
    if what == "figures":
        about = {"kvtier_stats": VERSION, "process": os.getpid(), "seconds": time.monotonic()}
        return about | {"stats": asdict(asked.stats())}
    if what == "forget" and asked.crash is not None:
        return state_of(pool) | {"forgotten": asked.crash.forget(inquiry.about)}
    if what == "reset" and pool is not None and pool.is_open:
        return state_of(pool) | {"fault": await pool.reset_all()}
    return None


def state_of(pool: Pool | None) -> dict[str, Any]:
    """`ready`: an engine has brought a layout, and the tiers are open or wait for its namespace. `engines` that are
    served."""
    ready = pool is not None and pool.is_open and not pool.fault
    engines = 0 if pool is None else sum(session.is_engine for session in pool.sessions.values())
    state = {"release": kvtier_version(), "protocol": PROTOCOLS[-1], "ready": ready, "engines": engines}
    return state | {"fault": "" if pool is None else pool.fault}


def status_of(pool: Pool | None) -> dict[str, Any]:
    """Rows by state, those of a former process that are out of use for a time or for good, and the tiers by name."""
    if pool is None or not pool.is_open:
        figures: dict[str, Any] = dict.fromkeys(("row_bytes", "waiting_rows", "lost_rows", "backlog"), 0)
        return state_of(pool) | figures | {"rows": {}, "tiers": {}}
    counts, stats = pool.plane.control.cpu.table.counts, pool.stats()
    shown = ("used_bytes", "capacity_bytes", "stored", "loaded", "evictions", "up")
    waiting, lost = pool.rows_of_before
    return state_of(pool) | {
        "row_bytes": pool.row_bytes,
        "waiting_rows": waiting,
        "lost_rows": lost,
        "backlog": stats.backlog,
        "rows": {state.name.lower(): counts[state] for state in SlotState if counts[state]},
        "tiers": {name: {figure: getattr(tier, figure) for figure in shown} for name, tier in stats.tiers.items()},
    }


def engines_of(pool: Pool | None, names: Mapping[Session, str]) -> dict[str, Any]:
    """Each engine that is connected or may still copy: its namespace, its rows, and its state."""
    sessions = [] if pool is None else list(pool.sessions.values())[:ENGINES_SHOWN_MAX]
    listed = [
        {
            "number": session.number,
            "name": names.get(session, "")[:TEXT_SHOWN_MAX],
            "namespace": "" if session.space is None else session.space.name[:TEXT_SHOWN_MAX],
            "state": _state(session),
            "shut": session.shut[:TEXT_SHOWN_MAX],
            "lent_rows": len(session.copying.lent),
            "copy_rows": session.copying.rows,
            "held_rows": session.held,
        }
        for session in sessions
    ]
    return state_of(pool) | {"listed": listed}


def _state(session: Session) -> str:
    if session.lost:
        return "gone"
    if session.shut:
        return "shut out"
    return "served" if session.serves else "waits" if session.is_engine else "joins"
