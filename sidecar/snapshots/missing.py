"""What a snapshot says is missing from it: trimmed by a limit, or taken out because it is nobody's business."""

from __future__ import annotations

from sidecar.receipts import Scrubbed
from sidecar.sizes import plural
from sidecar.snapshots.manifest import Manifest


def trimmed_words(manifest: Manifest) -> str:
    """What to say of a snapshot that a size limit kept from being whole; empty when it is."""
    if not manifest.dropped:
        return ""
    files, size = plural(manifest.dropped, "file"), plural(manifest.dropped_bytes, "byte")
    return f"This snapshot was trimmed: {files} with {size} {'was' if manifest.dropped == 1 else 'were'} left out."


def scrubbed_of(manifest: Manifest) -> Scrubbed:
    private, credentials = manifest.taken_out
    return Scrubbed(private=private, credentials=credentials)
