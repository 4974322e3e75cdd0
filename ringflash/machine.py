"""What a machine of Google Cloud is told of itself, by its metadata server."""

from __future__ import annotations

import os
import urllib.request

SERVER = "metadata.google.internal"
SECONDS = 5.0


def attribute(name: str) -> str:
    """The instance's attribute. GCE_METADATA_HOST, which Google's own libraries obey, names another server.

    Raises OSError where there is no such server or attribute.
    """
    host = os.environ.get("GCE_METADATA_HOST", SERVER)
    asked = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        return str(answer.read().decode())
