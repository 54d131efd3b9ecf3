"""A private stack process: `python -m kvtier.service`, with what it needs as JSON on stdin.

It says on stdout, in lines of JSON, which process it is, and then that it listens or why not.
"""

import json
import logging
import os
import sys
from contextlib import suppress
from typing import Any

from kvtier.errors import KVTierError
from kvtier.service.queued_log import log_to_stderr


class Starter:
    """The pipe to the process that started this one. It may have gone."""

    def __init__(self) -> None:
        self._pipe = os.dup(1)

    def say(self, **line: Any) -> None:
        """Write a line, if the pipe is still open."""
        if self._pipe >= 0:
            with suppress(BrokenPipeError):
                os.write(self._pipe, json.dumps(line).encode() + b"\n")

    def on_listening(self) -> None:
        """The process listens: nothing is said any more."""
        self.say(fault="")
        os.close(self._pipe)
        self._pipe = -1


def main() -> None:
    """Leave the process that started this one, and serve. No thread runs before the fork: little is loaded yet."""
    if not (text := sys.stdin.read()):
        return  # the process that starts this one has ended
    given = json.loads(text)
    starter = Starter()
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        starter.say(process=0)
        starter.say(fault=f"no process can be had ({error.strerror})")
        sys.exit(1)
    starter.say(process=os.getpid())
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    log_to_stderr("kvtier[%(process)d] %(levelname)s %(message)s", given["level"])
    from kvtier.service.run import PrivateLife, serve

    try:
        serve(given["stack"], given["path"], PrivateLife(given["linger_seconds"], starter.on_listening))
    except KVTierError as error:
        logging.getLogger("kvtier.service").error("the stack process ends: %s", error)  # noqa: TRY400
        starter.say(fault=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
