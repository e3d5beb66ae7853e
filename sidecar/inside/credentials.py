"""Credentials that can be told by their looks: one row for each kind, and a stream that finds them or blots them out.

Only kinds with a mark of their own are here, so that hardly anything else is taken for one. ``VERSION`` goes up with every
change of the rows: what was exported before is then looked at again.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Callable, Dict, List, NamedTuple, Pattern, Tuple

VERSION = 1
HOLD = 32 * 1024
"""No credential is longer: so many bytes are held back until it is known what follows them."""


class Kind(NamedTuple):
    """``literal`` is in every one of them. Where ``text`` has a group, that is the secret; else the whole is."""

    name: str
    literal: bytes
    text: bytes
    sign: bytes = b""
    """What a long one is suspected by, where only part of it may be to be seen."""


_EDGE = rb"(?:(?<![A-Za-z0-9_])|(?<=\\[nrt]))"
_END = rb"(?![A-Za-z0-9])"
_LINE = rb"(?:[ \t\r\n]|\\{1,8}[nrt])"
_PEM = (
    rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:"
    + _LINE
    + rb"{1,8}[A-Za-z-]{2,20}: [^\r\n\\]{0,200}){0,4}"
    rb"" + _LINE + rb"{0,8}[A-Za-z0-9+/=]{32,12000}(?:" + _LINE + rb"{1,4}[A-Za-z0-9+/=]{1,80}){0,200}"
    rb"(?:" + _LINE + rb"{0,8}-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)?"
)
_ASSIGNED = rb"(?:[\"']|\\{1,8}[\"'])?[ \t]{0,8}[:=][ \t]{0,8}(?:[\"']|\\{1,8}[\"'])?"
_WORDS = rb"[A-Za-z0-9_-]"

KINDS: Tuple[Kind, ...] = (
    Kind("aws-access-key", b"AKIA", _EDGE + rb"AKIA[A-Z0-9]{16}" + _END),
    Kind("aws-access-key", b"ASIA", _EDGE + rb"ASIA[A-Z0-9]{16}" + _END),
    *(
        Kind("aws-secret-key", word, re.escape(word) + _ASSIGNED + rb"([A-Za-z0-9/+]{40})" + _END)
        for word in (b"secret_access_key", b"SECRET_ACCESS_KEY", b"ecretAccessKey")
    ),
    *(
        Kind("github-token", b"gh" + kind + b"_", _EDGE + rb"gh" + kind + rb"_[A-Za-z0-9]{36,255}")
        for kind in (b"p", b"o", b"u", b"s", b"r")
    ),
    Kind("github-fine-grained-token", b"github_pat_", _EDGE + rb"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{40,100}"),
    Kind("gitlab-token", b"glpat-", _EDGE + rb"glpat-" + _WORDS + rb"{20,64}"),
    Kind("anthropic-key", b"sk-ant-", _EDGE + rb"sk-ant-[a-z]{2,12}[0-9]{2}-" + _WORDS + rb"{32,160}"),
    Kind("openai-key", b"T3BlbkFJ", _EDGE + rb"sk-" + _WORDS + rb"{16,120}T3BlbkFJ" + _WORDS + rb"{16,120}"),
    Kind("openai-key", b"sk-proj-", _EDGE + rb"sk-proj-" + _WORDS + rb"{40,200}"),
    Kind("openrouter-key", b"sk-or-", _EDGE + rb"sk-or-v1-[0-9a-f]{64}"),
    Kind("google-api-key", b"AIza", _EDGE + rb"AIza" + _WORDS + rb"{35}(?!" + _WORDS + rb")"),
    Kind("google-oauth-secret", b"GOCSPX-", _EDGE + rb"GOCSPX-" + _WORDS + rb"{28}"),
    Kind("google-access-token", b"ya29.", _EDGE + rb"ya29\." + _WORDS + rb"{40,400}"),
    *(
        Kind("slack-token", b"xox" + kind + b"-", _EDGE + rb"xox" + kind + rb"-[A-Za-z0-9-]{24,200}")
        for kind in (b"a", b"b", b"e", b"p", b"r", b"s")
    ),
    Kind("slack-webhook", b"hooks.slack.com", rb"hooks\.slack\.com\\{0,8}/services\\{0,8}/([A-Za-z0-9/\\]{36,90})"),
    Kind("stripe-key", b"sk_live_", _EDGE + rb"sk_live_[A-Za-z0-9]{20,128}"),
    Kind("stripe-key", b"rk_live_", _EDGE + rb"rk_live_[A-Za-z0-9]{20,128}"),
    Kind("stripe-webhook-secret", b"whsec_", _EDGE + rb"whsec_[A-Za-z0-9+/]{32,64}"),
    Kind("npm-token", b"npm_", _EDGE + rb"npm_[A-Za-z0-9]{36}" + _END),
    Kind("pypi-token", b"pypi-", _EDGE + rb"pypi-AgE" + _WORDS + rb"{50,400}"),
    Kind("huggingface-token", b"hf_", _EDGE + rb"hf_[A-Za-z0-9]{34,40}" + _END),
    Kind("sendgrid-key", b"SG.", _EDGE + rb"SG\." + _WORDS + rb"{22}\." + _WORDS + rb"{43}"),
    Kind("telegram-token", b":AA", _EDGE + rb"[0-9]{8,10}:AA" + _WORDS + rb"{33}(?!" + _WORDS + rb")"),
    Kind(
        *(
            "jwt",
            b"eyJ",
            _EDGE + rb"eyJ" + _WORDS + rb"{10,2000}\.eyJ" + _WORDS + rb"{10,4000}\." + _WORDS + rb"{16,1500}",
        )
    ),
    Kind("private-key", b"PRIVATE KEY", _PEM, rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY"),
    Kind("age-secret-key", b"AGE-SECRET-KEY-", rb"AGE-SECRET-KEY-1[0-9A-Z]{58}"),
    Kind("e2b-key", b"e2b_", _EDGE + rb"e2b_[0-9a-f]{40}" + _END),
    Kind("daytona-key", b"dtn_", _EDGE + rb"dtn_[0-9a-f]{64}" + _END),
    Kind("databricks-token", b"dapi", _EDGE + rb"dapi[0-9a-f]{32}(?:-[0-9])?" + _END),
    *(
        Kind("digitalocean-token", kind + b"_v1_", _EDGE + kind + rb"_v1_[0-9a-f]{64}" + _END)
        for kind in (b"dop", b"doo", b"dor")
    ),
    Kind("azure-key", b"AccountKey=", rb"AccountKey=([A-Za-z0-9+/]{86}==)"),
    Kind("azure-key", b"SharedAccessKey=", rb"SharedAccessKey=([A-Za-z0-9+/]{43}=)"),
    Kind("url-password", b"://", rb"://[^\s/:@\"'\\<>\[\]{}$]{1,64}:([^\s/@\"'\\<>\[\]{}$*]{3,128})@[A-Za-z0-9]"),
)
NAMES = frozenset(kind.name for kind in KINDS)


@lru_cache(maxsize=None)
def _pattern(text: bytes) -> Pattern[bytes]:
    return re.compile(text)


@lru_cache(maxsize=None)
def _quick() -> Tuple[Tuple[Pattern[bytes], ...], Tuple[bytes, ...]]:
    """The literals, a few passes for all: those that end or begin with the same rare byte are looked for together."""
    groups: Dict[bytes, List[bytes]] = {b"_": [], b"-": [], b"A": []}
    others = []
    for kind in KINDS:
        first, last = kind.literal[:1], kind.literal[-1:]
        key = last if last in (b"_", b"-") else first
        groups[key].append(kind.literal) if key in groups else others.append(kind.literal)
    ending = [
        key + b"(?:" + b"|".join(b"(?<=" + re.escape(one) + b")" for one in groups[key]) + b")" for key in (b"_", b"-")
    ]
    beginning = b"A(?:" + b"|".join(re.escape(one[1:]) for one in groups[b"A"]) + b")"
    return tuple(re.compile(text) for text in ending + [beginning]), tuple(others)


def may_hold(data: bytes) -> bool:
    """Whether there is a credential, or the beginning of a long one."""
    together, others = _quick()
    if not any(one.search(data) for one in together) and not any(one in data for one in others):
        return False
    return any(kind.literal in data and _pattern(kind.sign or kind.text).search(data) for kind in KINDS)


Found = Callable[[int, str], None]
"""Told the line of each credential, as it is in what is left, and its kind."""


class Credentials:
    """Feed it a text in pieces; what comes back is the text, with ``[redacted:KIND]`` for each credential if ``redact``."""

    def __init__(self, redact: bool, found: Found) -> None:
        self._redact = redact
        self._found = found
        self._buffer = b""
        self._context = 0
        """So much of the buffer has been given back, and is only looked back at."""
        self._line = 1

    def feed(self, data: bytes, last: bool = False) -> bytes:
        buffer, at = self._buffer + data, self._context
        out: List[bytes] = []
        limit = len(buffer) if last else len(buffer) - HOLD
        kinds = [kind for kind in KINDS if kind.literal in buffer] if at < limit else []
        nexts: Dict[Kind, Tuple[int, int]] = {}
        while at < limit:
            best = self._next(buffer, at, kinds, nexts)
            if best is None or nexts[best][0] >= limit:
                self._pass(buffer[at:limit], out)
                at = limit
                break
            start, end = nexts[best]
            self._pass(buffer[at:start], out)
            self._found(self._line, best.name)
            if self._redact:
                mark = b"[redacted:%s]" % best.name.encode()
                out.append(mark)
                # What follows is looked at as it will stand: after the mark.
                limit -= end - len(mark)
                buffer, at = mark + buffer[end:], len(mark)
                nexts.clear()
            else:
                self._pass(buffer[start:end], out)
                at = end
        self._context = min(at, 8)
        self._buffer = buffer[at - self._context :]
        return b"".join(out)

    def _next(self, buffer: bytes, at: int, kinds: List[Kind], nexts: Dict[Kind, Tuple[int, int]]) -> Kind | None:
        """The kind whose next one begins first (of those, the longest); where each of them is, is kept in ``nexts``."""
        for kind in list(kinds):
            if kind in nexts and nexts[kind][0] >= at:
                continue
            match = _pattern(kind.text).search(buffer, at)
            if match is None:
                kinds.remove(kind)
            else:
                nexts[kind] = match.span(1 if match.re.groups else 0)
        return min(kinds, key=lambda kind: (nexts[kind][0], -nexts[kind][1]), default=None)

    def _pass(self, data: bytes, out: List[bytes]) -> None:
        out.append(data)
        self._line += data.count(b"\n")
