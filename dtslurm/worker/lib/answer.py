"""Prints the answer of a program that was sent to another machine (`dtslurm.services.wiring.remote_query`).

The answer is one line, which starts with a mark and is compressed (zlib, base64), so that other output of a
login shell does no harm.
"""

import base64
import json
import sys
import zlib
from typing import Any, Dict


def tell(mark: str, values: Dict[str, Any]) -> None:
    """Print the answer."""
    compressed = zlib.compress(json.dumps(values).encode(), 1)
    sys.stdout.write("\n" + mark + base64.b64encode(compressed).decode() + "\n")
    sys.stdout.flush()
