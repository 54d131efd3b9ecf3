"""Workers: copies between GPU blocks and rows in this process, in others, or in the engine; the CPU tier calls them.

An engine with worker processes of its own connects each by a socket: `RemoteWorker` is the coordinator's end and goes
into `StackParts.workers`, `serve_worker` runs in the worker process. See "Worker processes" in docs/architecture.md.
"""

from kvtier.stack.workers.engine_copier import EngineCopies, EngineCopyOptions
from kvtier.stack.workers.remote_worker import RemoteWorker, WorkerLinkOptions, serve_worker

__all__ = ["EngineCopies", "EngineCopyOptions", "RemoteWorker", "WorkerLinkOptions", "serve_worker"]
