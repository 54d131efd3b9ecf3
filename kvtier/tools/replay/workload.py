"""Workloads of many turns, generated: sessions that grow turn by turn over shared system prompts.

Everything follows from a profile and a seed. Some of a session's turns come right after one another and are served
from the GPU; others come back after many other sessions and are found further down.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvtier.errors import ConfigError
from kvtier.traces.requests import Request, RequestSource
from kvtier.types.arrays import int_array

SYSTEM_SPACE = 1 << 62
SPACE_BLOCKS = 1 << 24


@dataclass(frozen=True, slots=True)
class Profile:
    """The shape of a workload. Ranges are inclusive, lengths in tokens.

    `revisit` is the chance that the next turn belongs to one of the `recent` sessions used last instead of to any;
    `regenerate` the chance that a turn replaces the one before it.
    """

    name: str
    block_tokens: int
    num_requests: int
    sessions: int
    systems: tuple[int, ...]
    opening_tokens: tuple[int, int]
    turn_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    mean_turns: int
    tokens_max: int
    recent: int = 3
    revisit: float = 0.5
    regenerate: float = 0.05


_CHAT = Profile(
    name="chat",
    block_tokens=16,
    num_requests=400,
    sessions=32,
    systems=(1024, 640, 320, 208),
    opening_tokens=(20, 400),
    turn_tokens=(10, 250),
    output_tokens=(20, 300),
    mean_turns=8,
    tokens_max=6144,
)
_AGENTIC = Profile(
    name="agentic",
    block_tokens=64,
    num_requests=200,
    sessions=6,
    systems=(16384,),
    opening_tokens=(1000, 8000),
    turn_tokens=(100, 3000),
    output_tokens=(30, 600),
    mean_turns=40,
    tokens_max=65536,
    recent=1,
    revisit=0.7,
    regenerate=0.02,
)
_HYBRID = replace(_CHAT, name="hybrid", num_requests=300, sessions=24, systems=(1000, 520))
PROFILES = {profile.name: profile for profile in (_CHAT, _AGENTIC, _HYBRID)}


def make_workload(name: str, seed: int, num_requests: int | None = None) -> RequestSource:
    """A generated source of requests. `seed` decides every length, every order and every block id.

    The longest request is found by generating the workload once.
    """
    profile = PROFILES[name]
    count = profile.num_requests if num_requests is None else num_requests
    if count < 1:
        raise ConfigError(f"must be at least 1, got {count}", "--requests")
    longest = max(len(request.ids) for request in _generate(profile, seed, count))
    return RequestSource(name, count, longest, profile.block_tokens, lambda: _generate(profile, seed, count))


def _generate(profile: Profile, seed: int, num_requests: int) -> Iterator[Request]:
    rng = random.Random(f"{profile.name}:{seed}")
    root = f"workload:{profile.name}:{seed}"
    sessions: list[_Session] = []
    opened = 0
    for _ in range(num_requests):
        if len(sessions) < profile.sessions and (not sessions or rng.random() >= profile.revisit):
            session = _Session(opened, profile, rng)
            opened += 1
        else:
            pool = sessions[-profile.recent :] if rng.random() < profile.revisit else sessions
            session = rng.choice(pool)
            sessions.remove(session)
        request = session.turn(root)
        if rng.random() * profile.mean_turns >= 1 and session.tokens < profile.tokens_max:
            sessions.append(session)
        yield request


class _Session:
    """A conversation: its tokens so far, and an id for each block they fill."""

    def __init__(self, number: int, profile: Profile, rng: random.Random) -> None:
        """A new session over one of the shared system prompts; whole blocks of it are shared."""
        self.number, self.profile, self.rng = number, profile, rng
        system = rng.randrange(len(profile.systems))
        self.tokens = self.before = profile.systems[system]
        first = SYSTEM_SPACE + system * SPACE_BLOCKS
        self.ids = list(range(first, first + self.tokens // profile.block_tokens))
        self.turns = self.named = 0

    def turn(self, root: str) -> Request:
        """The next request: the conversation so far and a new message. Its answer becomes part of the conversation."""
        profile, rng = self.profile, self.rng
        if self.turns and rng.random() < profile.regenerate:
            self.tokens = self.before
            del self.ids[self.tokens // profile.block_tokens :]
        self.before = self.tokens
        self.tokens += rng.randint(*(profile.turn_tokens if self.turns else profile.opening_tokens))
        prompt_tokens = self.tokens
        output_tokens = rng.randint(*profile.output_tokens)
        self.tokens += output_tokens
        while len(self.ids) < self.tokens // profile.block_tokens:
            self.ids.append(self.number * SPACE_BLOCKS + self.named)
            self.named += 1
        self.turns += 1
        prompt_blocks = prompt_tokens // profile.block_tokens
        return Request(root, str(self.number), int_array(self.ids), prompt_blocks, prompt_tokens, output_tokens)
