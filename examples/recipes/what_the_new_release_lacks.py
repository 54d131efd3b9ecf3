"""What an installed vLLM lacks of what the adapter needs."""

from kvtier.errors import ConfigError

try:
    import kvtier.engines.vllm  # noqa: F401 (runs the check)

    print("this release has all that the integration needs")
except ConfigError as error:
    print(error)  # names the release that is installed, and what it lacks
