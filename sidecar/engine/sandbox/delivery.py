"""Deliver the in-sandbox program: one shell command that carries the program and the request, and frames the answer."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import re
import secrets
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidecar.errors import BadAnswer

ENTRIES = {
    "export": ("program.capture.export", "program.limits.fit", "program.reaper", "program.restore.swap"),
    "restore": ("program.restore.restore", "program.restore.swap"),
    "tidy": ("program.restore.swap",),
    "send": ("program.links",),
    "look": ("program.inspection",),
}
"""The modules that ``program.main`` imports for each verb. A command carries these and everything that they import."""

LINKED = {"links", "parts"}
"""The fields of a request that contain links, one for each part: those of a restore, and those of an upload to the
bucket."""

UNSUITABLE = 97
"""Exit code of the bootstrap if this Python cannot run the program: too old, or without sqlite3."""

_RECENT = "import sys; sys.exit(sys.version_info < (3, 8))"
_CHECK = """import sys
if sys.version_info < (3, 8): sys.exit(97)
try: import base64, fcntl, json, os, types, zlib, importlib.machinery as machinery
except ImportError: sys.exit(97)
if "_sqlite3" not in sys.builtin_module_names and not machinery.PathFinder.find_spec("_sqlite3"): sys.exit(97)
"""
# A module is compiled only when it is first imported: one that is not needed costs nothing but its bytes.
_UNPACK = """texts = dict(json.loads(zlib.decompress(base64.b85decode(sys.argv[1]))))
packages = {name[:end] for name in texts for end, letter in enumerate(name) if letter == "."}
class Sent:
    def find_spec(self, name, path=None, target=None):
        if name in texts or name in packages: return type(sys.__spec__)(name, self, is_package=name in packages)
    def create_module(self, spec): return None
    def exec_module(self, module):
        name = module.__name__
        exec(compile(texts.get(name, ""), "<" + name.replace(".", "/") + ".py>", "exec"), module.__dict__)
sys.meta_path.insert(0, Sent())
"""
# On the sidecar's own machine the installed package is used, which is compiled already. Its folder is appended at the
# end of the path: other packages are there too, and must not hide modules of the standard library.
_FIND = """sys.path.append(sys.argv[1])
"""
# ``os._exit`` skips the interpreter's clean-up, which takes time with thousands of files and is not needed.
_RUN = """from sidecar.program.main import main
code = main(sys.argv[2])
sys.stdout.flush()
os._exit(code)
"""

_PACKAGE = Path(__file__).parents[2]
_ROOMS = ("format", "program")


def _list_installed() -> list[tuple[str, int, int]]:
    """Return names, sizes and times of the program's installed modules."""
    found = []
    with contextlib.suppress(OSError):
        for room in _ROOMS:
            for path in (_PACKAGE / room).rglob("*.py"):
                status = path.stat()
                found.append((str(path.relative_to(_PACKAGE)), status.st_size, status.st_mtime_ns))
    return sorted(found)


_STAND = _list_installed()


# The length of a command is limited to 128 KiB on Linux, and quotes in it may have to be quoted twice.
_DOCSTRING = re.compile(r'^( *)"""(?:[^"\\]|\\.|"(?!""))*"""$', re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^ *#.*$", re.MULTILINE)


def strip_comments(text: str) -> str:
    """Return a module's text without docstrings and comments. Every line keeps its number."""
    text = _DOCSTRING.sub(lambda found: f'{found[1]}""' + "\n" * found[0].count("\n"), text)
    return _COMMENT.sub("", text)


@functools.cache
def _read_modules() -> dict[str, str]:
    """Return the texts of all modules that may be sent, by their names below ``sidecar``."""
    texts = {}
    for room in _ROOMS:
        for path in sorted((_PACKAGE / room).rglob("*.py")):
            name = ".".join(path.relative_to(_PACKAGE).with_suffix("").parts)
            if not name.endswith(".__init__"):
                texts[name] = path.read_text("utf-8")
    return texts


def list_modules(verb: str) -> list[str]:
    """List the modules that a verb needs: its entries and everything that they import, also within functions."""
    texts = _read_modules()
    needed, todo = {"program.main"}, [*ENTRIES[verb], *_list_imports(texts["program.main"], lazy=False)]
    while todo:
        name = todo.pop()
        if name not in needed:
            needed.add(name)
            todo += _list_imports(texts[name], lazy=True)
    return sorted(needed)


# An import of ours: how far it is indented, the module, and the names on its line. Names in parentheses are never modules.
_IMPORT = re.compile(r"^( *)from sidecar\.([\w.]+) import (\(|[\w ,]+)", re.MULTILINE)
_FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:    .*\n|\n)+", re.MULTILINE)


def _list_imports(text: str, *, lazy: bool) -> list[str]:
    """The modules of ours that a module imports; ``lazy``: in functions too. Types alone do not count.

    By lines, as a formatter writes them: to parse all modules takes longer than all else that a small export does.
    """
    texts, found = _read_modules(), []
    for indent, base, names in _IMPORT.findall(_FOR_TYPES.sub("", text)):
        if lazy or not indent:
            modules = (base, *(f"{base}.{name.split()[0]}" for name in names.split(",") if name.strip("( ")))
            found += [name for name in modules if name in texts]
    return found


@functools.cache
def _pack_modules(verb: str) -> str:
    texts = [(f"sidecar.{name}", strip_comments(_read_modules()[name])) for name in list_modules(verb)]
    # Base 85 is a sixteenth denser than base 64 and has no quotes or backslashes. It has ``$`` and other special
    # characters, so it must be in single quotes.
    return base64.b85encode(zlib.compress(json.dumps(texts).encode(), 9)).decode()


def pack_programs(*verbs: str) -> None:
    """Pack the modules for these verbs, or for all, in advance, so that the first command does not have to."""
    for verb in verbs or ENTRIES:
        _pack_modules(verb)


LINKS = "MEMORY_SIDECAR_LINKS"
LONGEST_VARIABLE = 120 << 10
"""The longest value of an environment variable that is sent; Linux allows 128 KiB."""


@dataclass(frozen=True, slots=True)
class SandboxCommand:
    """One request as a command: the command to run, its environment, and the nonce that frames the answer."""

    command: str
    nonce: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


def build_command(request: dict[str, Any], *, fallback: str = "", installed: bool = False) -> SandboxCommand:
    """Build the command for a request. ``fallback`` is a short shell script for sandboxes without a suitable Python;
    without it, such a sandbox answers ``no-python``.

    A Python that cannot run any program, or does not know the options used here (before 3.4), counts as none. After
    some exit codes it is asked once more for its version only, because they are ambiguous: a command that is too long
    ends with 126 too, and a program that fails with 1.

    ``installed``: the command runs on this machine and uses the installed program, unless another version was installed
    since this process began.

    The links of a request are sent in the environment: every user of the sandbox can read a command with ``ps``.
    """
    nonce = secrets.token_hex(8)
    environment = {}
    for name in LINKED & request.keys():
        environment[LINKS] = encode_links(request[name])
        request = {**request, name: [{key: part[key] for key in part if key != "link"} for part in request[name]]}
    text = _pack_json({**request, "nonce": nonce})
    if installed and _STAND and _list_installed() == _STAND:
        bootstrap, source = _CHECK + _FIND + _RUN, shlex.quote(str(_PACKAGE.parent))
    else:
        bootstrap, source = _CHECK + _UNPACK + _RUN, f"'{_pack_modules(request['do'])}'"
    command = f"""r={UNSUITABLE}
for p in python3 python; do
command -v $p >/dev/null 2>&1 || continue
$p -I -S -c '{bootstrap}' {source} {text} </dev/null
r=$?
case $r in
{UNSUITABLE}) ;;
1|2|126|127) $p -E -S -c '{_RECENT}' </dev/null >/dev/null 2>&1 && break
r={UNSUITABLE};;
*) break;;
esac
done
if [ $r = {UNSUITABLE} ]; then
nonce={nonce}
{fallback or _build_no_python_answer(request, nonce)}
r=$?
fi
exit $r
"""
    return SandboxCommand(command, nonce, environment)


def build_shell_command(script: str) -> SandboxCommand:
    """Build the command for a shell script that answers like the program."""
    nonce = secrets.token_hex(8)
    return SandboxCommand(f"nonce={nonce}\n{script}", nonce)


def encode_links(parts: Sequence[Mapping[str, Any]]) -> str:
    """Encode the links of these parts as the value of an environment variable. If it is longer than
    ``LONGEST_VARIABLE``, a sandbox may reject it."""
    return _pack_json([part["link"] for part in parts])


def _pack_json(value: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 9)).decode()


def _build_no_python_answer(request: dict[str, Any], nonce: str) -> str:
    text = json.dumps({"status": "no-python", "memory": request["memory"], "snapshot": request["snapshot"]})
    begin, end = (f"memory-sidecar {nonce} {word}" for word in ("begin", "end"))
    removed = "".join(f"rm -f {shlex.quote(path)}\n" for path in request.get("uploads", ()))
    return f"{removed}printf '\\n%s\\n%s\\n%s\\n' {shlex.quote(begin)} {shlex.quote(text)} {shlex.quote(end)}"


def parse_output(output: bytes, nonce: str) -> tuple[dict[str, Any], bytes]:
    """Find the framed answer in a command's output. Return the JSON object and the inline bundle, if any.

    Raise ``BadAnswer`` if there is none, if it is not what the program prints, or if it was damaged on the way; only
    then a retry can help. The shell scripts print no hash. Accepting that is no weakness: anything that could drop the
    hash could have printed another answer.
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
