"""SGLang's own tests of a server with a storage backend, as its wheel has them, over kvtier: with our settings.

Left out are those that measure a model's answers (GSM8K): this one is random.
"""

from __future__ import annotations

import importlib
import random
import unittest
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support_controller import extra_config
from support_sglang import PAGE_TOKENS, make_model, server

with warnings.catch_warnings():  # our tests treat warnings as errors; what SGLang's imports warn of is not ours
    warnings.simplefilter("ignore")
    kit = importlib.import_module("sglang.test.kits.unified_radix_cache_kit")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore")]

VOCABULARY = 32768
Two: Any = kit.AccuracyTwoPassMixin
Multi: Any = kit.UnifiedRadixTreeTestMixin


class TestServer(Two, Multi, unittest.TestCase):
    """A server over a disk of kvtier, with prompts of random tokens."""

    test_gsm8k = test_gsm8k_two_passes = None
    l3_prefetch_page_size = PAGE_TOKENS
    l3_prefetch_prompt_pages = 40
    max_new_tokens = 32
    prefix_len = 256
    num_groups = branches_per_group = 2

    @classmethod
    def setUpClass(cls) -> None:
        folder = Path(cls.enterClassContext(TemporaryDirectory(prefix="kvtier-sglang-")))
        cls.model = str(make_model(folder / "model", VOCABULARY))
        tier = {"roots": [str(folder / "kv")], "capacity": "256MiB", "prefetch_threshold": PAGE_TOKENS}
        options = {"max-total-tokens": 16384, "hicache-storage-prefetch-policy": "wait_complete"}
        running = cls.enterClassContext(server(Path(cls.model), folder, extra_config(**tier), **options))
        cls.base_url = running.url
        rng = random.Random(1)
        cls.input_ids = [[rng.randrange(1, 30000) for _ in range(400)] for _ in range(4)]
