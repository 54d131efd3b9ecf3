"""The metrics of a stack over HTTP, as an option of a command."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from kvtier.errors import ConfigError
from kvtier.stack import StackStats


@contextmanager
def metrics_page(stats: Callable[[], StackStats], host: str, port: int, option: str) -> Iterator[int]:
    """Serve metrics at `http://HOST:PORT/metrics` while the block runs; yields the port, a free one for 0.

    Raises ConfigError with the name of the option where the client library is missing or the port is in use.
    """
    with ExitStack() as serving:
        try:
            from kvtier.metrics.exporter import metrics_server

            found = serving.enter_context(metrics_server(stats, port, host))
        except ModuleNotFoundError:
            raise ConfigError("needs a client library: pip install 'kvtier[metrics]'", option) from None
        except OSError as error:
            raise ConfigError(str(error), option) from None
        yield found
