"""The codes with which the program inside a sandbox can fail, in Python or as a shell script, and what each means.

docs/reference/errors.md and the OpenAPI document list them, and a test finds one that is not here. Any other code that
a sandbox says is not repeated to callers.
"""

from __future__ import annotations

REFUSALS = {
    "compressor-failed": "The program that compresses the pack stopped.",
    "database-busy": "Writers left no gap in which a database could be copied.",
    "database-damaged": "A database in the snapshot is damaged.",
    "database-unreadable": "A database could not be opened or read.",
    "disk-full": "The disk of the sandbox is full.",
    "in-the-way": "Something that is not part of the memory is where a folder or file of it has to be.",
    "incomplete": "After unpacking, files were missing or differed.",
    "journal-damaged": "An interrupted restore left notes that cannot be read.",
    "memory-changed": "The memory was written to while a restore put files in place.",
    "name-needs-python": "A name in the snapshot can only be restored where there is Python.",
    "no-direct": "The bucket cannot be reached from the sandbox. The pack then goes through the sidecar.",
    "no-python": "What was asked for needs Python 3.8 or newer in the sandbox.",
    "no-zstd": "The pack is compressed with zstd, which the sandbox does not have.",
    "pack-damaged": "A pack could not be unpacked in the sandbox.",
    "no-tar": "Without Python in the sandbox: a tool that is needed instead is not there either.",
    "other-protocol": "The program in the sandbox is of another version than the sidecar that asks it.",
    "os-error": "The operating system of the sandbox refused something; the message has its words.",
    "other-part": "A part of a memory was to be restored where there is more of it, another part, or another memory.",
    "plugin-older": "The program whose memory this is is older in the sandbox than in the snapshot.",
    "project-missing": "A folder named with `--project` is not there.",
    "root-outside": "A root of the memory leads out of a local sandbox.",
    "root-overlaps": "A root of the memory leads to where the sidecar keeps its own files or other memories.",
    "roots-collide": "Two roots of the snapshot would be restored into one folder.",
    "sandbox-busy": "Another export or restore runs in the sandbox.",
    "set-aside-full": "More would have to be set aside in the sandbox than is allowed.",
    "swap-failed": "The memory could not be put in place.",
    "tar-failed": "Without Python in the sandbox: its `tar` failed.",
    "unknown-layout": "The snapshot has a root that no layout here knows.",
    "unreadable": "A file or folder may not be read by the user that the sidecar works as.",
    "unsafe-path": "A root of the snapshot would lead out of its place.",
    "upload-damaged": "What was uploaded to the sandbox is not there or differs.",
    "worker-running": "A process has the memory open and did not stop.",
}
