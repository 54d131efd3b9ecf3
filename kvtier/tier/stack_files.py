"""Names of files that a stack keeps in a folder of its first lower tier, beside what the tier itself keeps there."""

import re

MODEL_FILE = re.compile(r"model-[a-z0-9_-]{1,32}(\.new)?")
"""What the stack's policies have learned. A tier neither reads nor removes it."""
