"""The control plane against a dict, under any order of events: right bytes or a miss, and the slot sum at each step."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support_control import ROW_BYTES, World, cpu_setup, fs_setup, key, plane_settings, shared_setup
from support_counts import machine

from kvtier.control.flow.stores import StoreRequest
from kvtier.types.hints import Demote, Pin, Prefetch, Release, Retain
from kvtier.types.jobs import JobKind
from kvtier.types.keys import GroupIndex, RequestId

KEYS = st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True)
FAULTS = st.sampled_from([None, None, None, "failed", "corrupt"])
GROUPS = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 1)), min_size=1, max_size=10, unique=True)
ONE_SIZE = (ROW_BYTES, ROW_BYTES)
"""Both groups have blocks of one size."""


class Machine(RuleBasedStateMachine):
    """`World` is the oracle: its bytes say what every load must return; it also watches for conflicting transfers."""

    @initialize(
        rows=st.integers(1, 12),
        slots=st.sampled_from([4, 8, 32]),
        policy=st.sampled_from(["lru", "arc"]),
        write_policy=st.sampled_from(["write_through", "on_evict"]),
        kind=st.sampled_from(["none", "one", "hybrid", "shared", "fs+shared", "two roots"]),
        watermark=st.integers(0, 2),
        admit=st.sampled_from(["always", "second_use"]),
    )
    def build(self, rows, slots, policy, write_policy, kind, watermark, admit):
        lowers = {
            "none": [],
            "one": [fs_setup(slots, 4, ONE_SIZE, policy=policy, write_policy=write_policy)],
            "hybrid": [fs_setup(slots, 4, (ROW_BYTES, 3 * ROW_BYTES), write_policy=write_policy, policy=policy)],
            "shared": [shared_setup(write_policy=write_policy, hint_seconds=5.0)],
            "fs+shared": [fs_setup(slots, 4, ONE_SIZE, write_policy=write_policy), shared_setup(hint_seconds=5.0)],
            "two roots": [fs_setup(slots, 4, ONE_SIZE, roots=2, policy=policy, write_policy=write_policy)],
        }[kind]
        probed = frozenset([GroupIndex(0)] if watermark else [])
        quota = {"retained_bytes_max": 3 * ROW_BYTES}
        lowers = [replace(setup, admit=admit, probed_groups=probed, **quota) for setup in lowers]
        cpu = replace(cpu_setup(rows, policy, groups=2), **quota)
        self.world = World(cpu, lowers, limits=plane_settings(watermark_rows=watermark, retained_sets=2))
        self.requests = 0

    @rule(blocks=GROUPS, timeout=st.sampled_from([None, 1.0, 100.0]))
    def store(self, blocks, timeout):
        self.world.submit(JobKind.STORE, [key(n, g) for n, g in blocks], timeout)

    @rule(blocks=GROUPS, timeout=st.sampled_from([None, 1.0, 100.0]))
    def load(self, blocks, timeout):
        self.world.submit(JobKind.LOAD, [key(n, g) for n, g in blocks], timeout)

    @rule(blocks=GROUPS)
    def look(self, blocks):
        self.world.plane.lookup([key(n, g) for n, g in blocks], self.world.now)
        self.world.collect()
        self.world.plane.touch([key(n, g) for n, g in blocks])

    @precondition(lambda self: self.world.running)
    @rule(pick=st.integers(0, 100), fault=FAULTS, every=st.integers(1, 3))
    def finish(self, pick, fault, every):
        self.world.finish(list(self.world.running)[pick % len(self.world.running)], fault, every)

    @precondition(lambda self: any(e.job.deadline is not None for e in self.world.running.values()))
    @rule(pick=st.integers(0, 100))
    def late(self, pick):
        timed = [job_id for job_id, e in self.world.running.items() if e.job.deadline is not None]
        self.world.make_late(timed[pick % len(timed)])

    @precondition(lambda self: self.world.late)
    @rule(pick=st.integers(0, 100), landed=st.booleans())
    def end_late(self, pick, landed):
        self.world.end_late(list(self.world.late)[pick % len(self.world.late)], landed)

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]))
    def pass_time(self, seconds):
        self.world.pass_time(seconds)

    @precondition(lambda self: len(self.world.jobs) > len(self.world.results))
    @rule(pick=st.integers(0, 100))
    def cancel(self, pick):
        open_jobs = [job_id for job_id in self.world.jobs if job_id not in self.world.results]
        self.world.plane.cancel(open_jobs[pick % len(open_jobs)], self.world.now)
        self.world.collect()

    @rule(blocks=GROUPS, request=st.integers(0, 3))
    def reserve(self, blocks, request):
        self.world.plane.reserve(RequestId(f"r{request}"), [key(n, g) for n, g in blocks], self.world.now)
        self.world.collect()

    @rule(blocks=GROUPS, kind=st.sampled_from([Retain, Pin, Prefetch, Demote, Release]), session=st.sampled_from("abc"))
    def hint(self, blocks, kind, session):
        named = [key(n, g) for n, g in blocks]
        hints = {Retain: (named, 30.0, session), Pin: (named, 30.0, session), Release: (session,)}
        result = self.world.plane.hint(kind(*hints.get(kind, (named, session))), self.world.now)
        if kind is not Release:
            assert result.accepted + sum(result.refused.values()) == len(named)
        self.world.step()

    @rule(request=st.integers(0, 3))
    def end_request(self, request):
        self.world.plane.end_request(RequestId(f"r{request}"), self.world.now)
        self.world.step()

    @rule()
    def reset(self):
        self.world.plane.reset(self.world.now)
        self.world.remote.clear()
        self.world.collect()

    @invariant()
    def sums_hold_and_no_byte_is_wrong(self):
        if hasattr(self, "world"):
            self.world.check()

    @invariant()
    def nothing_waits_for_nothing(self):
        """With no transfer under way and no lease, every load has ended, and every store once its patience is over."""
        if not hasattr(self, "world") or self.world.running or self.world.late:
            return
        plane = self.world.plane
        if plane.control.cpu.table.counts[5] or any(r.rows for r in plane.reservations.by_request.values()):
            return
        left = plane._open.jobs.values()
        assert all(isinstance(s, StoreRequest) and s.started + 1.0 > self.world.now for s in left)

    def teardown(self):
        """Whatever happened, everything ends: late I/O ends, deadlines pass, leases lapse, and no slot is lost."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for job_id in list(world.late):
            world.end_late(job_id, landed=False)
        for job_id in [j for j in world.jobs if j not in world.results and world.jobs[j].deadline is None]:
            world.plane.cancel(job_id, world.now)
        world.collect()
        for _ in range(6):
            world.run_all()
            world.pass_time(200.0)
        world.run_all()
        assert set(world.results) == set(world.jobs), "a job never ended"
        world.plane.abandon()
        world.step()
        world.run_all()
        world.check()
        counts = world.plane.control.cpu.table.counts
        assert counts[2] == counts[4] == 0, f"rows still filling or quarantined: {counts}"
        assert world.plane.control.cpu.table.evictable == counts[3], "a ready row is still held"


TestControlPlane = machine(Machine.TestCase, 200, 50)
