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
HINTS = {
    "database-busy": "Something writes to this database without a pause; stop it or try again. The head did not move.",
    "disk-full": "Free some space in the sandbox; a copy of its databases must fit. The head did not move.",
    "sandbox-busy": "Wait until the other export or restore is done, then try again.",
    "tar-failed": "Look at what it names, or put a python3 into the sandbox. The head did not move.",
    "unreadable": "Run the sandbox's commands as the user who owns the memory.",
    "worker-running": "Stop the process that has the memory open, then restore again. The memory there is as it was.",
    "other-part": "Use a fresh sandbox for a worker, or say --discard. What is there is as it was.",
    "plugin-older": "Update the plugin in the sandbox, or say --force. The memory there is as it was.",
    "in-the-way": "Move it away or choose another --project, then restore again. The memory there is as it was.",
    "root-outside": "Put it into the sandbox's home, name the folder with --project, or allow it: [service] local_roots in the"
    " config. Nothing was changed.",
    "root-overlaps": "Look who made it lead there: it must not. Nothing was changed.",
    "memory-changed": "Something writes to the memory; stop it or try again. The memory there is as it was.",
    "set-aside-full": "Move it away or say --discard, then restore again. The memory there is as it was.",
    "journal-damaged": "Remove ~/.cache/memory-sidecar in that sandbox, once nothing runs there. Nothing was changed.",
    "other-protocol": "Restart the sidecar: it was updated while it ran, and the program in the sandbox is of another version.",
    "unknown-layout": "Use the config file with which this memory was exported.",
}
