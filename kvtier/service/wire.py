"""Messages between an engine's processes and a stack process, protocol 1: structs, their bytes, and what is checked.

A message is one datagram of at most MESSAGE_BYTES_MAX bytes and holds items, each of which makes sense alone. A step of
an engine with more to send takes several messages; `split` divides what is long by its keys. Keys travel as their width
and their bytes one after another, rows as int32, generations as int64. Nothing of a peer is used before it was decoded
by its type, and a number of a peer only after a session compared it with what it handed out.

Leases and loans. A row that was found LEASED belongs to its request until the engine sends `Drop`, `End` or `Load` for
it; a row of `Lent` belongs to the engine until `Fill` or `Return`. Neither ends by time. With `Drop`, `End` or `Load`
the engine forgets what the request was found and all numbers that it still waits for. A `Found` for one of these that
comes later is void. When the connection ends, everything is void but copies in flight; rows stay as they are until the
processes of the engine have exited, or its workers have sent `Ready` on new connections.

Connections after the first. A worker that was connected before says `resumes`. It keeps the rows of before mapped until
`Drained` has come, ends its copies, maps the new rows and sends `Ready`. The scheduler connects once every load that it
has handed out has ended. So no load finds its rows gone.

Resets. All leases and states of all requests are void, and all numbers that wait: for the engine that resets from the
sending of `Reset` on, for the others when `Void` comes. The engine forgets them; the others also send `Drop` for each
request that had any. They may ask again at once. Rows that are lent stay lent. Fills and loads in flight end, not as
stored and not as loaded.

Releases. `Hello` names the protocols of its process, `Welcome` the newest of them that the stack process speaks too.
A release may add to protocol 1 fields at the end of an item, with a default: others ignore them. So may it add reasons
of outcomes and refusals: unknown ones are failures. All else takes a new number: an item, a state, a kind of hint, a
name in `info`, another meaning. Manifests and the rows' control area have no numbers for each connection: another one
shuts engines of other releases out. `tests/service/recorded` has a conversation that each release must be able to have.

Raises `WireError` for bytes that are no message of the type that is expected.
"""

from __future__ import annotations

import msgspec

from kvtier.service.packing import ITEM_KEYS_MAX as ITEM_KEYS_MAX
from kvtier.service.packing import JOB_BLOCKS_MAX as JOB_BLOCKS_MAX
from kvtier.service.packing import KEY_BYTES_MAX as KEY_BYTES_MAX
from kvtier.service.packing import KEYS_BYTES_MAX as KEYS_BYTES_MAX
from kvtier.service.packing import MESSAGE_BYTES_MAX as MESSAGE_BYTES_MAX
from kvtier.service.packing import TEXT_CHARACTERS_MAX as TEXT_CHARACTERS_MAX
from kvtier.service.packing import Breach as Breach
from kvtier.service.packing import Codec as Codec
from kvtier.service.packing import Item as Item
from kvtier.service.packing import Keys as Keys
from kvtier.service.packing import Places as Places
from kvtier.service.packing import WireError as WireError
from kvtier.service.packing import bounded_text as bounded_text
from kvtier.service.packing import split as split

PROTOCOLS = (1,)
"""Those that this release speaks, the newest last."""

# -- an engine to the stack process -----------------------------------------------------------------------------------


class Ask(Item, tag=1, frozen=True):
    """Look these keys of a request up; `number` comes back in `Found`.

    What is in rows is leased to the request at once, as far as the engine's bound goes. Nothing is promoted. With
    `more` its keys go on in the next `Ask`, which has a number of its own, and the answers come after the last of them.
    """

    request: str
    number: int
    keys: Keys
    more: bool = False


class Reserve(Item, tag=2, frozen=True):
    """Bring these keys into rows and lease them to the request; `number` comes back in `Found` once it is served."""

    request: str
    number: int
    keys: Keys


class Drop(Item, tag=3, frozen=True):
    """End the leases of a request, and what it waits for."""

    request: str


class Load(Item, tag=4, frozen=True):
    """A copy out of these rows, leased to the request, begins: they are the copy's until every worker has reported.

    The request's other leases end. The numbers of jobs, fills included, grow. With `more` its rows go on in the next
    `Load`, of the same job, and it begins with the last of them.
    """

    job: int
    request: str
    places: Places
    more: bool = False


class Fill(Item, tag=5, frozen=True):
    """A copy into these rows, which were lent, begins; they hold these keys once every worker has reported that has a
    slice of its own in a row.

    With `more` it goes on in the next `Fill`, of the same job, and begins with the last of them. With `waits` the rows
    hold the keys once the engine has sent `Filled` too.
    """

    job: int
    keys: Keys
    places: Places
    more: bool = False
    waits: bool = False


class Return(Item, tag=6, frozen=True):
    """Rows that were lent and are not needed."""

    places: Places


class Want(Item, tag=7, frozen=True):
    """The number of rows that the engine would like to have ahead.

    `needed`: all rows that it needs now, for stores that wait; it is lent those too, as far as its share of all goes.
    """

    rows: int
    needed: int = 0


class Begin(Item, tag=8, frozen=True):
    """A request begins with these keys: `request` of a stack. `info`: fields of a `RequestInfo` that are set.

    With `more` its keys go on in the next `Begin` of this request, which begins it unless that has `more` too. The
    `info` of the last one counts.
    """

    request: str
    keys: Keys
    info: dict[str, str | int | float | None] = {}
    more: bool = False


class Extend(Item, tag=9, frozen=True):
    """Keys of a request's output follow."""

    request: str
    keys: Keys


class End(Item, tag=10, frozen=True):
    """A request has ended, and its leases; it came `age` seconds ago. Lengths in tokens and the prompt where known.

    With `more` the keys of the prompt go on in the next `End` of this request, and it ends with the last of them.
    """

    request: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt: Keys | None = None
    age: float = 0.0
    more: bool = False


class Reset(Item, tag=11, frozen=True):
    """Make what was stored before unreachable; `number` comes back in `ResetDone`.

    `loads` counts the `Weights` without a number that had come on this connection.
    """

    number: int
    loads: int = 0


class AskStats(Item, tag=12, frozen=True):
    """Send the figures; with `rests` once no copy of this engine is in flight, so that all of those are in them."""

    rests: bool = False


class Announce(Item, tag=13, frozen=True):
    """Send events to this engine once more that say which tiers have these keys: each as removed, then as stored."""

    keys: Keys


class Hint(Item, tag=14, frozen=True):
    """A hint of an application about blocks. `kind`: name of a `KVHint` in lower case.

    With a `number` what becomes of it comes back in `Hinted`.
    """

    kind: str
    keys: Keys
    session: str = ""
    seconds: float = 0.0
    number: int = 0


class Computed(Item, tag=15, frozen=True):
    """The engine has computed so many tokens of a prompt, from so many seconds ago until so many seconds ago."""

    tokens: int
    begun: float
    ended: float


class HoldBack(Item, tag=16, frozen=True):
    """The weights of this engine are not those of its namespace: no lower tier serves it or takes its blocks.

    If other engines use the pool this one is served nothing any more: each lookup is a miss, each fill is dropped.
    """

    reason: str


class Join(Item, tag=17, frozen=True):
    """The manifest of the engine's namespace, now that all is known of it: from here on it is served."""

    manifest: bytes


class AskWeights(Item, tag=18, frozen=True):
    """Ask all workers whether their weights are those of the start; `number` comes back in `Weights`.

    Until all have answered that they are, the engine is served nothing: each lookup is a miss, each fill is dropped.
    If they are not, that ends with `HoldBack`, or with a better answer.
    """

    number: int


class Filled(Item, tag=19, frozen=True):
    """The word for a fill that waits: its blocks are those that its keys name, or with an errno they are not."""

    job: int
    errno: int = 0


class Look(Item, tag=20, frozen=True):
    """Look keys up for no request; `number` comes back in `Found`. Nothing is leased. With `asks` tiers are asked.

    `more` is that of an `Ask`.
    """

    number: int
    keys: Keys
    asks: bool = True
    more: bool = False


class Locate(Item, tag=21, frozen=True):
    """Name the highest tier that holds each key."""

    number: int
    keys: Keys


class Touch(Item, tag=22, frozen=True):
    """A request used these keys, given in prefix order."""

    request: str
    keys: Keys


class AskFigures(Item, tag=23, frozen=True):
    """Send all figures as they are."""

    number: int


class AskEvents(Item, tag=24, frozen=True):
    """Send `Events` from here on: first what the tiers have. For an engine whose greeting did not ask for them."""


class Leave(Item, tag=25, frozen=True):
    """The engine is about to close its connections, and no copy of it is in flight.

    A private process that serves no other one writes back and closes its tiers first, and ends. `distrust`: the reason
    why what this engine stored may have the name of other weights. Then it is reset before, and lower tiers are held
    back; also where a worker has left and ended the session.
    """

    number: int
    distrust: str = ""


FromEngine = (
    *(Ask, Reserve, Drop, Load, Fill, Return, Want, Begin, Extend, End, Reset, AskStats),
    *(Announce, Hint, Computed, HoldBack, Join, AskWeights, Filled),
    *(Look, Locate, Touch, AskFigures, AskEvents, Leave),
)

# -- the stack process to an engine -----------------------------------------------------------------------------------

LEASED, PENDING, MISSING, UNKNOWN, IN_ROW, LATE = range(6)
"""States of a key in `Found`: in a row that is leased; in a lower tier or on its way; nowhere; a tier was asked; for a
`Look` in a row; for a `Reserve` there, but in no row in time."""


class Found(Item, tag=32, frozen=True):
    """The state of each key of an `Ask`, `Look` or `Reserve`, one byte each, and the places of the leased ones.

    With `more` another one follows once tiers have answered: with the states of the keys that are UNKNOWN in this one.
    """

    number: int
    states: bytes
    places: Places
    more: bool = False


class Ended(Item, tag=33, frozen=True):
    """A job has ended: runs of (number, status, reason, errno) for its blocks. With `more` those of further blocks
    follow."""

    job: int
    outcomes: list[tuple[int, str, str, int]]
    more: bool = False


class Lent(Item, tag=34, frozen=True):
    """Rows that the engine may fill."""

    places: Places


class Revoke(Item, tag=35, frozen=True):
    """A wish: the engine drops these requests unless it has handed their leases to workers, and returns so many rows of
    those that are lent to it."""

    requests: list[str]
    lent: int = 0


class ResetDone(Item, tag=36, frozen=True):
    """A reset is durable, or why it is not."""

    number: int
    fault: str = ""


COUNTER, GAUGE, HISTOGRAM = range(3)
"""Kinds of series in `Stats`."""


class MetricSeries(msgspec.Struct, array_like=True, frozen=True):
    """A series of a metric. `values`: the increase of a counter; the value of a gauge; of a histogram runs of (value,
    count) of what was observed, with the sum of each bucket.

    A counter or a histogram without an increase is there the first time, so that its series begins at zero.
    """

    kind: int
    name: str
    labels: list[str]
    values: list[float]


class Stats(Item, tag=37, frozen=True):
    """A part of the figures since the last `AskStats`; `last`: no part follows."""

    series: list[MetricSeries]
    last: bool


class Closing(Item, tag=38, frozen=True):
    """The stack process is about to end, or a worker has left: everything is a miss from now on."""

    reason: str


class Notes(Item, tag=39, frozen=True):
    """The notes of workers from number `first` on, once all have connected. With `last` the engine may `Join`."""

    first: int
    notes: list[str]
    last: bool = True


class Joined(Item, tag=40, frozen=True):
    """The engine is served, or the reason why not. `follows`: policies or curves follow requests."""

    fault: str = ""
    follows: bool = False


class Events(Item, tag=41, frozen=True):
    """Blocks that became reachable in a tier or ceased to be: (tier, medium, removed, keys) each."""

    events: list[tuple[str, str, bool, Keys]]


class Weights(Item, tag=42, frozen=True):
    """The answer to `AskWeights`: the worst verdict of the workers, by its number.

    `number` 0: a worker has loaded weights. Nothing is served until `HoldBack` and a `Reset` that counts it, and no
    fill of before is stored.
    """

    number: int
    verdict: int


class Void(Item, tag=43, frozen=True):
    """Another engine has reset the pool: leases and states of all requests are void, as the module's docstring says."""


class Located(Item, tag=44, frozen=True):
    """The names of tiers, and for each key of a `Locate` a byte: 0, or the place of its tier among them from 1 on."""

    number: int
    tiers: list[str]
    places: bytes


class Hinted(Item, tag=45, frozen=True):
    """The blocks that a hint is followed for, and those left as they are by reason."""

    number: int
    accepted: int
    refused: dict[str, int]


class FiguresPart(Item, tag=46, frozen=True):
    """A part of the figures of the stack, as JSON; `last`: no part follows."""

    number: int
    part: bytes
    last: bool


class Left(Item, tag=47, frozen=True):
    """The engine may go. `ends`: so does this process, with so many blocks dropped and jobs that did not end."""

    number: int
    ends: bool = False
    dropped: int = 0
    unfinished: int = 0


ToEngine = (
    *(Found, Ended, Lent, Revoke, ResetDone, Stats, Closing, Notes, Joined, Events, Weights, Void),
    *(Located, Hinted, FiguresPart, Left),
)

# -- workers, and the beginning of a connection -----------------------------------------------------------------------


class Copied(Item, tag=64, frozen=True):
    """A worker's part of a copy has ended: runs of (number, errno) for its blocks, in order. With `more` those of
    further blocks follow."""

    job: int
    outcomes: list[tuple[int, int]]
    more: bool = False


UNKNOWN_WEIGHTS, CHANGED, UNCHANGED = range(3)
"""Verdicts about weights, the worst first."""


class Answer(Item, tag=65, frozen=True):
    """A worker's verdict about its weights, for a `Question`: one of these numbers."""

    number: int
    verdict: int


class Loaded(Item, tag=66, frozen=True):
    """A worker is about to load weights: the reports that follow may be of blocks that others have computed. It waits
    for `LoadNoted`."""


class Quiet(Item, tag=67, frozen=True):
    """The last item of a worker: no copy of it is in flight, and none begins any more."""


class Ready(Item, tag=68, frozen=True):
    """A worker that resumes has mapped the rows. No copy of an earlier connection of its process is in flight, and none
    begins any more."""


FromWorker = (Copied, Answer, Loaded, Quiet, Ready)


class Question(Item, tag=80, frozen=True):
    """Are the weights those of the start?"""

    number: int


class Drained(Item, tag=81, frozen=True):
    """The scheduler has connected: no load of an earlier connection comes any more. For workers that resume."""


class LoadNoted(Item, tag=82, frozen=True):
    """The answer to `Loaded`: nothing is served to the engine any more, and it was sent `Weights`."""


ToWorker = (Question, Drained, LoadNoted)


class Hello(Item, tag=96, frozen=True):
    """The first message of a process; its own pidfd comes with it.

    `role`: scheduler or worker; `participant`: the worker's number. `token` is one for each life of an engine.
    `manifest` is that of the namespace as far as it is known; `note` is what a worker adds to it.
    With `complete` in the scheduler's greeting that is all of it, and the engine joins with it, once its workers are
    there. `events`: the engine takes `Events`. `resumes`: the process was connected before; a worker then sends
    `Ready`, and counts from there on. `reads_only`: the worker fills no row, and is sent rows that it cannot write.
    """

    protocols: list[int]
    release: str
    role: str
    participant: int
    engine_id: str
    token: str
    manifest: bytes
    note: str = ""
    complete: bool = True
    events: bool = True
    resumes: bool = False
    reads_only: bool = False


class Welcome(Item, tag=97, frozen=True):
    """The answer; descriptors of the segments come with it. `incarnation` is new with each stack process.

    `life` is the same for all processes of an engine that are connected at one time, and for no others.
    """

    protocol: int
    incarnation: str
    session: int
    num_rows: int
    row_bytes: int
    alignment: int

    @property
    def life(self) -> str:
        """The name of the session, also among those of other stack processes."""
        return f"{self.incarnation}.{self.session}"


class Refused(Item, tag=98, frozen=True):
    """The answer to a process that is not served: everything is a miss.

    `let_go`: no load of rows of before comes any more, and memory is wanted, so a worker is to unmap those it has.
    """

    reason: str
    let_go: bool = False


class Inquiry(Item, tag=99, frozen=True):
    """The first message of an operator, in the place of `Hello`, without a pidfd.

    `what`: ping, status, engines, figures, reset or forget, the last with the id of an engine as `about`.
    """

    what: str
    about: str = ""


class InquiryAnswer(Item, tag=100, frozen=True):
    """A part of the answer, a JSON document; `last`: no part follows, and the connection ends."""

    document: bytes
    last: bool = True


Greeting = (Hello, Welcome, Refused, Inquiry, InquiryAnswer)
TO_ENGINE, FROM_ENGINE, TO_WORKER, FROM_WORKER, GREETING = map(
    Codec, (ToEngine, FromEngine, ToWorker, FromWorker, Greeting)
)
