"""A private stack process: `python -m kvtier.service`, with what it needs as JSON on stdin."""

import json
import sys

from kvtier.service.run import serve

if __name__ == "__main__":
    given = json.load(sys.stdin)
    serve(given["stack"], given["path"], given["linger_seconds"])
