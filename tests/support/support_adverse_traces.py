"""Requests that are hard for a policy that learns: each trace is made from a seed and named by what is wrong with it.

Prompts are lists of keys, each key once; times are seconds. `TRACES` are their makers: the seed and how many requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush

from benchmarks.policies import TimedRequest
from kvtier.types.keys import OffloadKey, make_key


def prompt(name: str, blocks: int) -> list[OffloadKey]:
    """A prompt of its own: its n-th key names its first n blocks."""
    return [make_key(f"{name}/{block}".encode(), 0) for block in range(blocks)]


def asked(time: float, keys: list[OffloadKey], output_tokens: int = 50) -> TimedRequest:
    return TimedRequest(time, keys, len(keys), output_tokens)


def chats(seed: int, count: int, one_offs: float = 0.0, returns: float = 0.6) -> list[TimedRequest]:
    """Sessions whose next turn comes after about 90 s with this probability; some prompts are long and come once."""
    rng, due, requests, time = random.Random(seed), list[tuple[float, int, int]](), list[TimedRequest](), 0.0
    for session in range(count):
        time += rng.expovariate(1.0)
        while due and due[0][0] <= time:
            at, returning, blocks = heappop(due)
            requests.append(asked(at, prompt(f"chat {returning}", blocks), 200))
            if rng.random() < returns:
                heappush(due, (at + rng.lognormvariate(4.5, 0.8), returning, blocks + rng.randrange(2, 8)))
        if rng.random() < one_offs:
            requests.append(asked(time, prompt(f"one-off {session}", rng.randrange(30, 120))))
            continue
        blocks = rng.randrange(2, 30)
        requests.append(asked(time, prompt(f"chat {session}", blocks), 200))
        if rng.random() < returns:
            heappush(due, (time + rng.lognormvariate(4.5, 0.8), session, blocks + rng.randrange(2, 8)))
    return requests[:count]


def clock_restarts(seed: int, count: int) -> list[TimedRequest]:
    """Chats whose clock begins anew every 500 requests, as the control plane makes it: it goes on from there."""
    requests, ahead, last = chats(seed, count), 0.0, 0.0
    found = []
    for number, request in enumerate(requests):
        time = request.time - requests[number // 500 * 500].time
        if not number % 500 and number:
            ahead = last - time
        last = time + ahead
        found.append(TimedRequest(last, request.keys, request.blocks, request.output_tokens))
    return found


def clock_stands_still(seed: int, count: int) -> list[TimedRequest]:
    """Chats that all come at one time."""
    return [TimedRequest(0.0, r.keys, r.blocks, r.output_tokens) for r in chats(seed, count)]


def endless_session(seed: int, count: int) -> list[TimedRequest]:
    """One session that grows with every third request, among prompts that come once."""
    rng, keys, requests, time = random.Random(seed), list[OffloadKey](), list[TimedRequest](), 0.0
    endless = prompt("endless", 2 * count)
    for number in range(count):
        time += rng.expovariate(1 / 3)
        if number % 3:
            requests.append(asked(time, prompt(f"other {number}", rng.randrange(2, 40))))
        else:
            keys = endless[: len(keys) + rng.randrange(1, 6)]
            requests.append(asked(time, keys))
    return requests


def random_keys(seed: int, count: int, power: float = 1.0) -> list[TimedRequest]:
    """Prompts drawn from a fixed number of them, whatever came before; with a power above 1 some more often."""
    rng, requests, time, prompts = random.Random(seed), list[TimedRequest](), 0.0, dict[int, list[OffloadKey]]()
    for _ in range(count):
        time += rng.expovariate(3.0)
        drawn = int(count / 4 * rng.random() ** power)
        keys = prompts.setdefault(drawn, prompt(f"drawn {drawn}", 1 + drawn % 17))
        requests.append(asked(time, keys, rng.randrange(1, 500)))
    return requests


def skewed_keys(seed: int, count: int) -> list[TimedRequest]:
    return random_keys(seed, count, 2.0)


def classes_swap(seed: int, count: int) -> list[TimedRequest]:
    """Short prompts come back four times, long ones never; from the middle on it is the other way round."""
    rng, due, requests, time = random.Random(seed), list[tuple[float, int, int, int]](), list[TimedRequest](), 0.0
    for number in range(count):
        time += rng.expovariate(1.0)
        while due and due[0][0] <= time:
            at, session, blocks, left = heappop(due)
            requests.append(asked(at, prompt(f"prompt {session}", blocks)))
            if left:
                heappush(due, (at + rng.lognormvariate(4.5, 0.5), session, blocks, left - 1))
        short = rng.random() < 0.5
        blocks = rng.randrange(3, 8) if short else rng.randrange(20, 40)
        requests.append(asked(time, prompt(f"prompt {number}", blocks)))
        if short == (number < count // 2):
            heappush(due, (time + rng.lognormvariate(4.5, 0.5), number, blocks, 3))
    return requests


def never_again(seed: int, count: int) -> list[TimedRequest]:
    """No block comes twice."""
    rng = random.Random(seed)
    return [asked(0.3 * number, prompt(f"once {number}", rng.randrange(1, 40))) for number in range(count)]


def floods(seed: int, count: int) -> list[TimedRequest]:
    """Chats, and among them as many blocks again and more in long prompts that come once."""
    return chats(seed, count, one_offs=0.3)


def scans(seed: int, count: int) -> list[TimedRequest]:
    """Documents one after the other, from the first again after the last."""
    rng = random.Random(seed)
    documents = [prompt(f"document {number}", rng.randrange(10, 40)) for number in range(count // 16)]
    return [asked(float(number), documents[number % len(documents)]) for number in range(count)]


def branches(seed: int, count: int) -> list[TimedRequest]:
    """Each block of a prompt is one of a few that may follow the one before: short fronts are shared, ends are not."""
    rng, requests, time = random.Random(seed), list[TimedRequest](), 0.0
    for _ in range(count):
        time += rng.expovariate(2.0)
        names = [f"{rng.randrange(6)}" for _ in range(rng.randrange(1, 13))]
        keys = [make_key("/".join(names[: end + 1]).encode(), 0) for end in range(len(names))]
        requests.append(asked(time, keys, rng.randrange(1, 500)))
    return requests


def single_blocks(seed: int, count: int) -> list[TimedRequest]:
    """Prompts of one block: more of them than a tier may tell apart."""
    rng, requests, time = random.Random(seed), list[TimedRequest](), 0.0
    for _ in range(count):
        time += rng.expovariate(2.0)
        requests.append(asked(time, prompt(f"single {int(count / 4 * rng.random() ** 1.5)}", 1)))
    return requests


def regimes(seed: int, count: int) -> list[TimedRequest]:
    """In turns 600 chats and 600 prompts drawn at random; each kind goes on from where it was."""
    chatting, drawn = iter(chats(seed, count)), iter(random_keys(seed + 1000, count))
    requests, time = list[TimedRequest](), 0.0
    last = {True: 0.0, False: 0.0}
    for number in range(count):
        is_chat = number // 600 % 2 == 0
        request = next(chatting if is_chat else drawn)
        time += request.time - last[is_chat]
        last[is_chat] = request.time
        requests.append(TimedRequest(time, request.keys, request.blocks, request.output_tokens))
    return requests


def pauses(seed: int, count: int) -> list[TimedRequest]:
    """Chats with a pause of three days after every 700."""
    return [
        TimedRequest(r.time + number // 700 * 259_200.0, r.keys, r.blocks, r.output_tokens)
        for number, r in enumerate(chats(seed, count))
    ]


TRACES: dict[str, Callable[[int, int], list[TimedRequest]]] = {
    maker.__name__: maker
    for maker in (
        chats, clock_restarts, clock_stands_still, endless_session, random_keys, skewed_keys, classes_swap,
        never_again, floods, scans, branches, single_blocks, regimes, pauses,
    )
}  # fmt: skip
