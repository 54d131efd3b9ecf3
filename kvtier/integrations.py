"""The former place of `kvtier.engines`: a configuration that names `kvtier.integrations.vllm` gets what is there."""

import sys

import kvtier.engines

sys.modules[__name__] = kvtier.engines
