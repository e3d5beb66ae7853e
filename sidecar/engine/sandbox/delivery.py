"""Deliver a request to the in-sandbox program: one shell command that finds the program in the sandbox, checks it and
runs it, and frames the answer.

What a command brings is packed in one piece: the request and, if the sandbox lacks them, the rules and the program. A
short request is in the command itself. The rest is in the environment, or in an uploaded file if it is too long for
that, or if the environment did not arrive.

The rules and the program are kept by the sandbox, each named by its hash. The program is a package: a zip of the modules
of ``sidecar.format`` and ``sidecar.program`` as they are. Nothing in it is compressed, so that the same modules make the
same bytes wherever it is built; it is compressed as a whole on its way.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import io
import json
import os
import re
import secrets
import shlex
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from sidecar.errors import BadAnswer
from sidecar.format.protocol import (
    NEED_PROGRAM,
    NEED_REQUEST,
    AllowedPaths,
    Answer,
    AnyQuestion,
    IncomingPart,
    Link,
    OutgoingPart,
    Request,
    RestoreQuestion,
    Rules,
    SendQuestion,
    encode,
)
from sidecar.host.values import dataclass
from sidecar.layouts import Layout
from sidecar.program.kept_files import LONGEST, PROGRAM

ROOT = Path(__file__).parents[2]
ROOMS = ("format", "program")
_NO_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest that a zip can say."""

UNSUITABLE = 97
"""Exit code of the bootstrap if this Python cannot run the program: too old, or without sqlite3."""
PIECE = "MEMORY_SIDECAR_"
"""The name of a variable with a piece of what a command brings, without its number."""
LINKS = "MEMORY_SIDECAR_LINKS"
"""The variable with the links to a bucket: every user of the sandbox can read a command with ``ps``."""
LONGEST_VARIABLE = 120 << 10
"""The longest value of an environment variable that is sent; Linux allows 128 KiB."""
MOST_VARIABLES = 1 << 20
"""So many bytes may be in the environment; Linux allows 2 MiB for it and the command together."""
LONGEST_TEXT = 64 << 10
"""The longest request that is in the command itself."""

_RECENT = "import sys; sys.exit(sys.version_info < (3, 8))"
# No single quotes: it is an argument in a shell script. ``first`` and ``second`` are where the rules and the program
# begin in what was sent. A process has one request: to collect garbage in it is not worth its time.
_BEGIN = f"""import gc, sys
gc.disable()
if sys.version_info < (3, 8): sys.exit({UNSUITABLE})
try: import base64, fcntl, hashlib, os, zlib, importlib.machinery as machinery
except ImportError: sys.exit({UNSUITABLE})
if "_sqlite3" not in sys.builtin_module_names and not machinery.PathFinder.find_spec("_sqlite3"): sys.exit({UNSUITABLE})
nonce, source, text, pieces, first, second, path, size = sys.argv[1:]
def read(path, most):
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file: return file.read(most) or b""
    except OSError: return b""
def unpack(data):
    try: return zlib.decompress(data)
    except zlib.error: return b""
def need(what):
    print("\\nmemory-sidecar %s begin\\n{{\\"status\\": \\"%s\\"}}\\nmemory-sidecar %s end" % (nonce, what, nonce))
    sys.exit()
more = "".join(os.environ.pop("{PIECE}%d" % number, "") for number in range(int(pieces)))
sent = base64.b64decode(text) + base64.b64decode(more) + read(path, int(size))
first, second = int(first), int(second)
request, rules, package = unpack(sent[:first]), unpack(sent[first:second]), unpack(sent[second:])
if not request: need("{NEED_REQUEST}")
"""
# What is run is what was hashed: the file is not opened again. Where it lies is what ``program/scratch.py`` says.
_LOAD = f"""def right(data): return hashlib.sha256(data).hexdigest() == source
if not right(package): package = b""
cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME") or os.path.expanduser("~"), ".cache")
spare = ["%s/memory-sidecar-%d" % (folder, os.geteuid()) for folder in (os.environ.get("TMPDIR") or "/tmp", "/tmp")]
kept = (read(folder + "/{PROGRAM}" % source, {LONGEST}) for folder in [cache + "/memory-sidecar"] + spare)
program = package or next(filter(right, kept), b"")
if not program: need("{NEED_PROGRAM}")
import io, zipfile
program, loader = zipfile.ZipFile(io.BytesIO(program)), {{}}
exec(program.read("sidecar/program/loader.py"), loader)
loader["install"](program)
"""
# On the sidecar's own machine the installed package is used, which is compiled already. Its folder is appended at the
# end of the path: other packages are there too, and must not hide modules of the standard library.
_FIND = """sys.path.append(source)
"""
# ``os._exit`` skips the interpreter's clean-up, which takes time with thousands of files and is not needed.
_RUN = """from sidecar.program.main import main
code = main(nonce, request, rules, package)
sys.stdout.flush()
os._exit(code)
"""


class KeptFile:
    """Something that a sandbox keeps, and its name there."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.sha256 = hashlib.sha256(data).hexdigest()

    @functools.cached_property
    def packed(self) -> bytes:
        """The file as it travels."""
        return zlib.compress(self.data, 9)


@functools.cache
def build_program() -> KeptFile:
    """Return the package with the program. It is built once, when it is first needed."""
    import zipfile  # late: most sandboxes have it already

    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as package:
        for path in list_modules():
            member = zipfile.ZipInfo(path.relative_to(ROOT.parent).as_posix(), _NO_TIME)
            member.create_system, member.external_attr = 3, 0o644 << 16  # as on Unix, also where it is built elsewhere
            package.writestr(member, path.read_bytes())
    return KeptFile(target.getvalue())


def list_modules() -> list[Path]:
    """List the files of the program's modules, in a stable order."""
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def build_rules(layouts: Iterable[Layout]) -> KeptFile:
    """Return the rules with these layouts: all that the sidecar knows."""
    return _make_kept_file(Rules([layout.for_sandbox() for layout in layouts]).encode())


@functools.lru_cache(maxsize=8)
def _make_kept_file(data: bytes) -> KeptFile:
    return KeptFile(data)


def _list_installed() -> list[tuple[str, int, int]]:
    """Return names, sizes and times of the program's installed modules. Each command does it, so without ``pathlib``."""
    found = []
    for room in ROOMS:
        for folder, _, names in os.walk(os.path.join(ROOT, room)):
            for name in names:
                if name.endswith(".py"):
                    with contextlib.suppress(OSError):
                        status = os.stat(os.path.join(folder, name))
                        found.append((os.path.join(folder, name), status.st_size, status.st_mtime_ns))
    return sorted(found)


_STAND = _list_installed()


def is_installed() -> bool:
    """Return whether the program that is installed on this machine is still the one of this process."""
    return bool(_STAND) and _list_installed() == _STAND


@dataclass(frozen=True, slots=True)
class SandboxCommand:
    """One request as a command: the command to run, its environment, and the nonce that frames the answer."""

    command: str
    nonce: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    upload: bytes = field(default=b"", repr=False)
    """What has to be uploaded to ``path`` before the command is run. The program removes it."""
    path: str = ""


@dataclass(frozen=True, slots=True)
class CarriedFiles:
    """An uploaded file that begins with the rules and the program: that of a restore."""

    path: str
    rules: KeptFile
    program: KeptFile

    @property
    def data(self) -> bytes:
        """The beginning of the file."""
        return self.rules.packed + self.program.packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a command is to bring."""

    question: AnyQuestion
    rules: KeptFile | None = None
    """The rules to answer by, if there are any."""
    program: KeptFile | None = None
    """The program to run; ``None``: the one that is installed on this machine."""
    with_rules: bool = False
    """Send the rules: the sandbox may lack them."""
    with_program: bool = False
    """Send the program: the sandbox may lack it."""
    carried: CarriedFiles | None = None
    """A file in the sandbox that has both."""
    allowed: AllowedPaths | None = None


def build_command(load: Load, upload_path: str = "") -> SandboxCommand:
    """Build the command that brings a load. With ``upload_path``, all of it is in a file that is uploaded there first.

    A sandbox without a suitable Python answers ``no-python``. A Python that cannot run any program, or does not know
    the options used here (before 3.4), counts as none. After some exit codes it is asked once more for its version
    only, because they are ambiguous: a command that is too long ends with 126 too, and a program that fails with 1.
    """
    nonce = secrets.token_hex(8)
    environment = _list_links(load.question)
    named = load.rules.sha256 if load.rules is not None else ""
    request = zlib.compress(Request(load.question, named, load.allowed, upload_path).encode(), 9)
    rules = load.rules.packed if load.rules is not None and load.with_rules else b""
    program = load.program.packed if load.program is not None and load.with_program else b""
    text, rest, file, path = request, rules + program, b"", ""
    if upload_path:
        text, rest, file, path = b"", b"", request + rules + program, upload_path
    elif load.carried is not None:
        rules, rest, file, path = load.carried.rules.packed, b"", load.carried.data, load.carried.path
    if len(text) > LONGEST_TEXT:
        text, rest = b"", text + rest
    words = _encode(rest)
    pieces = [words[at : at + LONGEST_VARIABLE] for at in range(0, len(words), LONGEST_VARIABLE)]
    environment.update({f"{PIECE}{number}": piece for number, piece in enumerate(pieces)})
    source = load.program.sha256 if load.program is not None else str(ROOT.parent)
    cuts = len(request), len(request) + len(rules)
    arguments = [nonce, source, _encode(text), len(pieces), *cuts, path, len(file)]
    bootstrap = _BEGIN + (_FIND if load.program is None else _LOAD) + _RUN
    command = f"""r={UNSUITABLE}
for p in python3 python; do
command -v $p >/dev/null 2>&1 || continue
$p -I -S -c '{bootstrap}' {shlex.join(map(str, arguments))} </dev/null
r=$?
case $r in
{UNSUITABLE}) ;;
1|2|126|127) $p -E -S -c '{_RECENT}' </dev/null >/dev/null 2>&1 && break
r={UNSUITABLE};;
*) break;;
esac
done
[ $r = {UNSUITABLE} ] || exit $r
{_build_no_python_answer(load.question, nonce, upload_path)}
"""
    return SandboxCommand(command, nonce, environment, file if upload_path else b"", upload_path)


def is_too_long(call: SandboxCommand) -> bool:
    """Return whether a command has more in its environment than a sandbox may take."""
    return sum(len(value) for name, value in call.environment.items() if name != LINKS) > MOST_VARIABLES


def build_shell_command(script: str) -> SandboxCommand:
    """Build the command for a shell script that answers like the program."""
    nonce = secrets.token_hex(8)
    return SandboxCommand(f"nonce={nonce}\n{script}", nonce)


def _list_links(question: AnyQuestion) -> dict[str, str]:
    """Return the variable with the links of a question, if it has any. The question itself is sent without them."""
    parts: Sequence[IncomingPart | OutgoingPart] = []
    if isinstance(question, SendQuestion):
        parts = question.parts
    elif isinstance(question, RestoreQuestion):
        parts = question.links or []
    links = [part.link for part in parts]
    return {LINKS: encode_links(links)} if links else {}


def encode_links(links: Sequence[Link | None]) -> str:
    """Encode links as the value of an environment variable. If it is longer than ``LONGEST_VARIABLE``, a sandbox may
    reject it."""
    return _encode(zlib.compress(encode(links), 9))


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _build_no_python_answer(question: AnyQuestion, nonce: str, upload_path: str) -> str:
    text = encode(Answer("no-python", question.memory, question.snapshot)).decode()
    begin, end = (f"memory-sidecar {nonce} {word}" for word in ("begin", "end"))
    uploads = [*getattr(question, "uploads", ()), *filter(None, [upload_path])]
    removed = "".join(f"rm -f {shlex.quote(path)}\n" for path in uploads)
    return f"{removed}printf '\\n%s\\n%s\\n%s\\n' {shlex.quote(begin)} {shlex.quote(text)} {shlex.quote(end)}"


def parse_output(output: bytes, nonce: str) -> tuple[dict[str, Any], bytes]:
    """Find the framed answer in a command's output. Return the JSON object and the inline bundle, if any.

    Raise ``BadAnswer`` if there is none, if it is not what the program prints, or if it was damaged on the way; only
    then a retry can help. The bootstrap and the shell scripts print no hash. Accepting that is no weakness: anything
    that could drop the hash could have printed another answer.
    """
    mark = f"memory-sidecar {nonce} ".encode()
    frame = re.search(
        re.escape(mark) + rb"begin\n(.*)" + re.escape(mark) + rb"end(?: ([0-9a-f]{64}))?\n",
        output.replace(b"\r\n", b"\n"),
        re.DOTALL,
    )
    if frame is None or (frame[2] and hashlib.sha256(frame[1]).hexdigest().encode() != frame[2]):
        cut = BadAnswer("The sandbox's answer did not arrive whole.")
        cut.retryable = True
        raise cut
    text, _, inline = frame[1].partition(b"\n")
    try:
        value = json.loads(text.decode("utf-8", "replace"))  # a shell prints file names as raw bytes
        bundle = base64.b64decode(inline.strip(), validate=True)
    except (ValueError, RecursionError) as problem:
        raise BadAnswer(f"The sandbox's answer is not what its program prints: {problem}") from None
    if not isinstance(value, dict):
        raise BadAnswer("The sandbox's answer is not a JSON object.")
    return value, bundle
