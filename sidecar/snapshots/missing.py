"""What a snapshot says is missing from it: trimmed by a limit, or taken out because it is nobody's business."""

from __future__ import annotations

from sidecar.receipts import Scrubbed
from sidecar.sizes import format_count
from sidecar.snapshots.manifest import Manifest


def describe_trimmed(manifest: Manifest) -> str:
    """What to say of a snapshot that a size limit kept from being whole; empty when it is."""
    if not manifest.dropped:
        return ""
    files, size = format_count(manifest.dropped, "file"), format_count(manifest.dropped_bytes, "byte")
    return f"This snapshot was trimmed: {files} with {size} {'was' if manifest.dropped == 1 else 'were'} left out."


def count_scrubbed(manifest: Manifest) -> Scrubbed:
    private, credentials = manifest.taken_out
    return Scrubbed(private=private, credentials=credentials)
