"""LoRA adapters in vLLM's keys by what their files contain.

vLLM names an adapter in the hash of a block by its name and path, so files that are replaced keep the keys of those
before. `content_in_keys` has the hash hold a digest of the files instead of the path, for all of vLLM's caches alike.

An adapter is bound to its files at the first request, or `add_lora`, that names its id: no worker has loaded it before.
Afterwards a worker keeps it, or drops it and reads the files again, unseen. So what workers hold is known as long as
the files have not changed since they were bound. Once they have, each request of the adapter has keys of its own, until
`add_lora` with `load_inplace` has every worker read the files again.
"""

import functools
import gc
import importlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from huggingface_hub import try_to_load_from_cache
from vllm import envs
from vllm.config import LoRAConfig
from vllm.platforms import current_platform

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.engines.digests import YOUNG_SECONDS, Cancelled, ContentDigests
from kvtier.engines.vllm.compat import engine_version
from kvtier.errors import ResourceError

CONFIG = "adapter_config.json"
FILES = (CONFIG, "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""What vLLM reads of an adapter: its configuration and the first of the others."""
DIGEST_SECONDS = 5.0
"""How long the first requests of an adapter wait for its digest; later ones do not wait."""
ADAPTERS_MAX = 1 << 16
"""How many adapters are remembered, and contents that are not stored any more."""
THREADS = 2
_FUNCTION = "_gen_lora_extra_hash_keys"
_NAMED = "_kvtier_adapter"
"""The attribute of vLLM's request that holds its `NamedAdapter`."""

_log = logging.getLogger(__name__)

FileStates = tuple[tuple[int, ...], ...]
"""Of each of FILES device, inode, size and times in nanoseconds, that of the last change last; () without the file."""


@dataclass(eq=False, slots=True)
class Adapter:
    """An adapter bound to the state of its files. Without `folder` they cannot be seen from here; without `files` it is
    not known what the workers hold.

    Files that were young when they were bound are digested once more from `stable_at` on, as `again`.
    """

    identity: tuple[str, bool]
    folder: Path | None
    files: FileStates
    content: Future[str]
    stable_at: float | None = None
    again: Future[str] | None = None
    logged: bool = False
    deadline: float = field(default_factory=lambda: time.monotonic() + DIGEST_SECONDS)
    salt: str = field(default_factory=lambda: secrets.token_hex(16))

    def holds(self) -> bool:
        """True if the files have not changed since they were bound."""
        if self.folder is None:
            return True
        return adapter_folder(self.identity[0]) == self.folder and file_states(self.folder) == self.files

    def stable(self) -> bool:
        """True if no change of the files could have gone unseen."""
        return self.stable_at is None or (self.again is not None and value(self.again) == value(self.content))

    def lose(self) -> None:
        """It is not known any more what the workers hold."""
        self.folder, self.files = self.folder or Path(), ()


@dataclass(frozen=True, eq=False)
class NamedAdapter:
    """The name of one request's adapter in keys; without `adapter` its keys are its own."""

    content: str
    adapter: Adapter | None


class AdapterKeys:
    """Takes the place of vLLM's function. Safe to call from the threads that make requests and from the scheduler's."""

    def __init__(self, theirs: Callable[[Any], list[tuple[str, ...]]], digests: ContentDigests | None = None) -> None:
        self.users: set[object] = set()
        self.undo = ExitStack()
        self.blind = False
        self.spreads = adapters_spread()
        self._used = False
        self._theirs = theirs
        self._digests = digests or ContentDigests()
        self._threads = DaemonPool("kvtier-adapters", THREADS)
        self._lock = threading.Lock()
        self._adapters: dict[int, Adapter] = {}
        self._requests: WeakValueDictionary[str, NamedAdapter] = WeakValueDictionary()
        self._spoiled: dict[str, None] = {}

    def __call__(self, request: Any) -> list[tuple[str, ...]]:
        """vLLM's extra keys of a request, with what its adapter contains in place of its path."""
        keys = self._theirs(request)
        if not keys:
            return keys
        named: NamedAdapter | None = getattr(request, _NAMED, None)
        if named is None:
            self._use()
            named = self._name(request.lora_request)
            setattr(request, _NAMED, named)  # it lives as long as the request
            self._requests[request.request_id] = named
        return [(*key[:-1], named.content) for key in keys]

    def storable(self, request_id: str) -> bool:
        """True if what this request has computed up to now surely is what its keys name.

        Without an adapter it is, unless vLLM lets adapters of others into it. Then no such request is stored from the
        first request of an adapter on: vLLM's own prefix cache hands on what was computed beside one.
        """
        named = self._requests.get(request_id)
        if named is None or named.adapter is None:
            return named is None and not self.blind and not (self.spreads and self._used)
        if not named.adapter.holds():
            self._spoil(named.content)
        return named.content not in self._spoiled and named.adapter.stable()

    @property
    def used(self) -> bool:
        """True once a request had an adapter: what it stores may turn out to be of another."""
        return self._used

    def load(self, lora: Any, load: Callable[[], bool]) -> bool:
        """Call `load`, which has the workers load an adapter unless they hold one of its id and it is not to be
        replaced in place."""
        adapter = self._adapters.get(lora.lora_int_id)
        if adapter is None or adapter.folder is None or lora.load_inplace:
            if adapter is not None and not adapter.holds() and (content := value(adapter.content)) is not None:
                self._spoil(content)
            adapter = self._bind(lora)
        try:
            return load()
        except BaseException:
            adapter.lose()  # some of the workers may have loaded it
            raise

    def release(self, user: object) -> None:
        """The last user gives vLLM its functions back. Idempotent."""
        self.users.discard(user)
        if not self.users:
            self.undo.close()
            self._digests.cancel()
            self._threads.shutdown()

    def _use(self) -> None:
        if self.spreads and not self._used:
            _log.warning(
                "this vLLM computes requests without an adapter by the adapter of another one in the batch "
                "(right in vLLM 0.33): from now on they are not stored"
            )
        self._used = True

    def _name(self, lora: Any) -> NamedAdapter:
        with self._lock:
            adapter = self._adapters.get(lora.lora_int_id) or self._bind(lora)
        content = None
        if adapter.identity == _identity(lora) and adapter.holds():
            if adapter.again is None and adapter.stable_at is not None and time.monotonic() > adapter.stable_at:
                adapter.again = self._threads.submit(self._content, adapter.identity, adapter.folder or Path())
            content = value(adapter.content, adapter.deadline - time.monotonic())
        if content is None:
            _log_once(adapter, lora, "was changed, or cannot be read: its requests share no KV until it is loaded anew")
            return NamedAdapter(_unique(lora.lora_path), None)
        if adapter.folder is None:
            _log_once(adapter, lora, "cannot be seen from here: KV of its requests is of no use to other processes")
        return NamedAdapter(f"{content} {adapter.salt}" if content in self._spoiled else content, adapter)

    def _bind(self, lora: Any) -> Adapter:
        """Called before a worker reads the files: what they contain now is what the workers will hold."""
        identity = _identity(lora)
        folder = adapter_folder(lora.lora_path)
        files = () if folder is None else file_states(folder)
        if len(self._adapters) >= ADAPTERS_MAX and lora.lora_int_id not in self._adapters:
            return Adapter(identity, Path(), (), Future())
        if folder is None or not files[0] or not any(files[1:]):
            adapter = Adapter(identity, None, (), Future())
            adapter.content.set_result(_unique(lora.lora_path))
        else:
            adapter = Adapter(identity, folder, files, self._threads.submit(self._content, identity, folder))
            if time.time_ns() - max(state[-1] for state in files if state) < YOUNG_SECONDS * 1e9:
                adapter.stable_at = time.monotonic() + YOUNG_SECONDS
        self._adapters[lora.lora_int_id] = adapter
        return adapter

    def _content(self, identity: tuple[str, bool], folder: Path) -> str:
        digest = self._digests.digest([path for name in FILES if (path := folder / name).exists()])
        return f"sha256:{digest}{' 3d' * identity[1]}"

    def _spoil(self, content: str) -> None:
        """Blocks under this name may be of another content, also in vLLM's own caches: none is stored any more."""
        self._spoiled[content] = None
        if len(self._spoiled) > ADAPTERS_MAX:
            del self._spoiled[next(iter(self._spoiled))]


def content_in_keys(user: object) -> AdapterKeys:
    """Have the keys of this process name adapters by content until each user has called `release`.

    A vLLM that makes keys in another way is left as it is; if it serves adapters, nothing is storable.
    """
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    engine = importlib.import_module("vllm.v1.engine.core").EngineCore
    theirs, add_lora = getattr(utils, _FUNCTION, None), getattr(engine, "add_lora", None)
    if not isinstance(theirs, AdapterKeys):
        theirs = _installed(utils, engine, theirs, add_lora)
    theirs.users.add(user)
    return theirs


def _installed(utils: Any, engine: Any, theirs: Any, add_lora: Any) -> AdapterKeys:
    keys = AdapterKeys(theirs)
    if theirs is None or add_lora is None:
        keys.blind = any(type(found) is LoRAConfig for found in gc.get_objects())
        if keys.blind:
            _log.error("this vLLM makes keys of LoRA adapters in another way: while adapters are served, no KV is kept")
        return keys

    @functools.wraps(add_lora)  # vLLM converts arguments by the signature
    def add(self: Any, lora_request: Any) -> bool:
        return keys.load(lora_request, lambda: add_lora(self, lora_request))

    for place, name, ours, original in ((utils, _FUNCTION, keys, theirs), (engine, "add_lora", add, add_lora)):
        setattr(place, name, ours)
        keys.undo.callback(setattr, place, name, original)
    return keys


def adapters_spread() -> bool:
    """True if this vLLM computes a request without an adapter by the one of another request in the batch."""
    return current_platform.is_cpu() and engine_version().startswith("0.32")


def adapter_folder(path: str) -> Path | None:
    """The folder from which vLLM loads an adapter; None if it first has to fetch it, or by another way."""
    folder = Path(path).expanduser()
    if folder.is_absolute() or folder.exists():
        return folder.absolute()
    if envs.VLLM_USE_MODELSCOPE:
        return None
    try:
        config = try_to_load_from_cache(path, CONFIG)
    except ValueError:  # no id of a repository
        return None
    return Path(config).parent if isinstance(config, str) else None


def file_states(folder: Path) -> FileStates:
    """The states of an adapter's files now."""
    return tuple(map(_state, (folder / name for name in FILES)))


def _state(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def value(digest: Future[str], timeout_seconds: float = 0.0) -> str | None:
    """The digest if it is known within that time, and the files could be read."""
    try:
        return digest.result(max(0.0, timeout_seconds))
    except (OSError, ResourceError, Cancelled) as error:  # a timeout is an OSError
        _log.debug("no digest of an adapter: %r", error)
        return None


def _identity(lora: Any) -> tuple[str, bool]:
    return str(lora.lora_path), bool(lora.is_3d_lora_weight)


def _unique(path: str) -> str:
    return f"{path} {secrets.token_hex(16)}"


def _log_once(adapter: Adapter, lora: Any, text: str) -> None:
    if not adapter.logged:
        adapter.logged = True
        _log.warning("LoRA adapter %.200a at %.500a %s", lora.lora_name, lora.lora_path, text)
