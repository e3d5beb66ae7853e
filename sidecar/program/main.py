"""Run one request and print one answer, framed so that the output of a login shell cannot be mistaken for it.

memory-sidecar <nonce> begin
{"status": …}
<base64 of the bundle, when it is small enough>
memory-sidecar <nonce> end <sha256 of the lines between>
"""

from __future__ import annotations

import base64
import contextlib
import errno
import gc
import hashlib
import json
import os
import sys
import zlib
from typing import Any

from sidecar.format.refusal import Refusal
from sidecar.program import leftovers, places
from sidecar.program.scratch import Scratch

LINKS = "MEMORY_SIDECAR_LINKS"
MOST_ANSWER = 64 << 20


def main(argument: str) -> int:
    """Run the request in ``argument`` and print the answer. Errors are answers too; the exit code is 0."""
    gc.disable()  # one request per process: collecting is not worth its time
    request = _decode_request(argument)
    links = os.environ.pop(LINKS, "")  # removed before any child process could inherit it
    home = os.path.realpath(os.environ.get("HOME") or os.path.expanduser("~"))
    inline = b""
    left: list[str] = []
    try:
        _add_links(request, links)
        answer, inline = _run(request, home, left)
    except Refusal as refusal:
        answer = _build_error(refusal.code, refusal.message, refusal.retryable)
    except OSError as problem:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        answer = _build_error("disk-full" if full else "os-error", "The sandbox says: %s." % problem, False)
    answer.update(
        memory=request["memory"],
        snapshot=request["snapshot"],
        home=home,
        user=_read_user(),
        python="%d.%d" % sys.version_info[:2],
        left=left,
    )
    _print(request["nonce"], answer, inline)
    return 0


def _read_user() -> str:
    """Return the name of the user this runs as, or the number if it has no name."""
    try:
        import pwd

        return pwd.getpwuid(os.geteuid()).pw_name
    except (ImportError, KeyError):
        return str(os.geteuid())


def _decode_request(text: str) -> Any:
    """Decode a request: JSON, compressed, in base64."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


def _add_links(request: dict[str, Any], text: str) -> None:
    """Add the presigned links to the parts of a request. They come in the environment, which other users cannot read."""
    parts = request.get("links", request.get("parts", []))
    try:
        links = _decode_request(text) if parts else []
    except (ValueError, zlib.error):
        links = []
    if len(links) != len(parts):
        raise Refusal("no-direct", "The links did not arrive.")
    for part, link in zip(parts, links):
        part["link"] = link


def _run(request: dict[str, Any], home: str, left: list[str]) -> tuple[dict[str, Any], bytes]:
    """Carry out a request. Return the answer and the bytes of the bundle, if it is small enough to be printed."""
    if request["do"] == "send":
        from sidecar.program.links import send

        return send(request), b""
    if request["do"] == "look":
        from sidecar.program.inspection import look

        return look(request, home), b""
    places.close_folders()
    kept, uploads = False, request.get("uploads", ())
    in_use = [one for one in map(leftovers.lock_upload, uploads) if one is not None]  # locked until this run ends
    scratch = Scratch(home, request["key"], request["turn_wait"], request["snapshot"], request)
    try:
        undone = _undo_restores(scratch)
        if request["do"] == "tidy":
            return _read_last_answer(scratch, request) or {"status": "tidy"}, b""
        if request["do"] == "export":
            answer = _export(request, scratch, home)
        else:
            from sidecar.program.restore.restore import Restore

            answer = Restore(request, scratch, home).run()
            if answer["status"] == "unsaved":
                leftovers.keep_uploads(uploads)  # they are needed again once the memory was saved
                uploads = ()
            else:
                with contextlib.suppress(OSError):  # a full disk: it is only needed if this answer is lost
                    places.write_file(_locate_answer(scratch), json.dumps([request["operation"], answer]).encode())
        answer["warnings"] += scratch.warnings
        if undone:
            answer["warnings"].append("A restore that was cut short earlier has been undone.")
        bundle = answer.get("bundle")
        if bundle is None:
            return answer, b""
        if bundle["bytes"] > request["inline_bytes"]:
            kept = True
            return answer, b""
        with open(bundle["path"], "rb") as file:
            answer["bundle"]["inline"] = True
            return answer, file.read()
    finally:
        scratch.leave(keep=kept)
        if kept:
            from sidecar.program.reaper import reap

            reap(scratch.work, os.path.join(scratch.work, "bundle"))
        # The work is done whether or not the uploads can be removed: in /tmp only a file's owner can remove it. What
        # could not be removed is reported as ``left``.
        left += [path for path in uploads if not leftovers.remove(path)]
        for one in in_use:
            os.close(one)


def _undo_restores(scratch: Scratch) -> bool:
    """Undo restores of any memory that were cut short, because memories can share folders. Return whether there was one."""
    found = False
    for journal in scratch.iterate_journals():
        from sidecar.program.restore.swap import settle

        found = bool(settle(journal, scratch.contained)) or found
    return found


def _export(request: dict[str, Any], scratch: Scratch, home: str) -> dict[str, Any]:
    """Export; start again if it turns out to be over a limit, or if the base cannot be used."""
    from sidecar.program.capture.export import BaseUnusable, Export
    from sidecar.program.limits.fit import ExportLimits, OverLimit

    fit = ExportLimits(request["limits"])
    while True:
        run = Export(request, scratch, home, fit)
        try:
            return run.run()
        except OverLimit:
            run.taking.bundle.abandon()
            fit.start_round()
        except BaseUnusable:
            run.taking.bundle.abandon()
            request = dict(request, unusable=request.get("unusable", []) + run.lineage[:1])


def _locate_answer(scratch: Scratch) -> str:
    return os.path.join(scratch.memory, "answer")


def _read_last_answer(scratch: Scratch, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer of an earlier restore whose answer was lost on the way, else ``None``."""
    try:
        kept = json.loads(places.read_file(_locate_answer(scratch), MOST_ANSWER))
    except (OSError, ValueError, RecursionError):
        return None
    mine = isinstance(kept, list) and len(kept) == 2 and kept[0] == request["operation"] and isinstance(kept[1], dict)
    return kept[1] if mine else None


def _build_error(code: str, message: str, retryable: bool) -> dict[str, Any]:
    return {"status": "error", "error": {"code": code, "message": message, "retryable": retryable}}


def _print(nonce: str, answer: dict[str, Any], inline: bytes) -> None:
    """Print the framed answer, with a checksum over its lines."""
    body = json.dumps(answer, separators=(",", ":")).encode() + b"\n"
    if inline:
        body += base64.b64encode(inline) + b"\n"
    mark = ("memory-sidecar %s " % nonce).encode()
    end = hashlib.sha256(body).hexdigest().encode()
    out = sys.stdout.buffer
    out.write(b"\n" + mark + b"begin\n" + body + mark + b"end " + end + b"\n")
    out.flush()
