"""Credentials that can be recognised by their form: one row per kind, and a stream that finds or redacts them.

Only kinds with a characteristic mark are listed, so that hardly anything else matches. ``VERSION`` is raised with every
change of the rows: what was exported before is then examined again.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Callable, Dict, List, NamedTuple, Pattern, Tuple

VERSION = 3
LONGEST_KEY = 128 * 1024
HOLD = LONGEST_KEY + 32 * 1024
"""No credential is longer: this many bytes are held back until it is known what follows them."""
PIECE = 128 * 1024
KEY_SHARE = 0.8
"""The share of the text between a key's first and last line that must be long words of base64; in other texts that
contain both lines it is much lower."""


class Kind(NamedTuple):
    """One kind: it begins with ``literal``, which is searched quickly; ``rest`` is what follows.

    If ``rest`` has a group, that is the secret; else the whole match is.
    """

    name: str
    literal: bytes
    rest: bytes
    edge: bool = True
    """It does not begin in the middle of a word. JSON or URL escapes and terminal colours before it are not part of a
    word."""
    long: bool = False
    """A private key: the row matches its first line only, which is suspicious anywhere; ``_find_key_end`` finds the end."""

    @property
    def text(self) -> bytes:
        """The regular expression of this kind."""
        literal = re.escape(self.literal)
        words = rb"|".join([rb"(?<![A-Za-z0-9_]%s)" % literal] + [rb"(?<=%s%s)" % (no, literal) for no in _NO_WORD])
        return literal + (rb"(?:" + words + rb")" if self.edge else b"") + self.rest


_NO_WORD = (
    rb"\\[bfnrt]", rb"\\u[0-9A-Fa-f]{4}", rb"\\x[0-9A-Fa-f]{2}", rb"%[0-9A-Fa-f]{2}",
    rb"\[m", *(rb"[\[;][0-9]{%d}m" % digits for digits in (1, 2, 3)),
)  # fmt: skip
_END = rb"(?![A-Za-z0-9])"
_KEY = rb"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_LAST_LINE = rb"-----END " + _KEY
_NO_KEY = rb"[][{}\0]"
_WORD = rb"(?:[A-Za-z0-9+/=]|\\{1,8}/){16,16384}(?![A-Za-z0-9+/=])"
_LINE_END = rb"(?:\r?\n|\r|(?:\\{1,8}r)?\\{1,8}n)"
_NEXT = rb"[ \t\"',;+]{0,8}(?:" + _LINE_END + rb"[ \t>|#*;\"',]{0,80}){1,4}"
_TOLD = rb"(?:" + _NEXT + rb"[A-Za-z-]{2,20}: [^\r\n\\]{0,200}){0,4}"
_AROUND = rb"\\{1,8}[nrt\"'/]|[\s>|#*;\"',+`]+"
_ALONE = rb"(?=[ \t]{0,8}(?:" + _LINE_END + rb"|\\{0,8}[\"']|[`<]|-----|\Z|[A-Za-z0-9+/=]{32}))"
_KEY_LINES = (
    _TOLD + rb"(?:(?:" + _NEXT + rb"|[ \t]{0,8})" + _WORD + _ALONE + rb")+"
    rb"(?:" + _NEXT + rb"(?:[A-Za-z0-9+/]{0,15}={1,2}|=[A-Za-z0-9+/]{4})(?![A-Za-z0-9+/=])){0,2}"
)
_QUOTE = rb"(?:[\"']|\\{1,8}[\"'])?"
_AWS_SECRET = (
    _QUOTE + rb"[ \t]{0,8}(?:[:=]>?|\\{1,8}u003[dD])[ \t]{0,8}" + _QUOTE + rb"([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])"
)
_SLASH = rb"\\{0,8}/"
_DISCORD = rb"[0-9]{17,20}" + _SLASH + rb"([A-Za-z0-9_-]{60,80})"
_HOOK = rb"([A-Z0-9]{8,14}" + _SLASH + rb"[A-Z0-9]{8,14}" + _SLASH + rb"[A-Za-z0-9]{20,40})"
_WORDS = rb"[A-Za-z0-9_-]"
_NO_NAME = rb"(?=[a-z_-]{0,32}[A-Z0-9])"
"""A name in code may be as long, but then it has only small letters."""
_BEARER = rb"[ ]{1,4}((?=[A-Za-z._~+/-]{0,64}[0-9])[A-Za-z0-9._~+/-]{24,2000}(?<![.])={0,2})"
_PLACEHOLDER = rb"(?:\$\(?[A-Za-z_][A-Za-z0-9_]{0,63}\)?|%\([A-Za-z0-9_]{1,64}\)s|\*+|\.+)@"
_URL = (
    rb"[^\s/?#:@\"'\\<>\[\]]{0,64}:(?!" + _PLACEHOLDER + rb")([^\s/?#@\"'\\<>\[\]{}]{3,512})"
    rb"@(?!sha[0-9]{3}:)[A-Za-z0-9_\[${%]"
)

KINDS: Tuple[Kind, ...] = (
    Kind("aws-access-key", b"AKIA", rb"[A-Z0-9]{16}" + _END),
    Kind("aws-access-key", b"ASIA", rb"[A-Z0-9]{16}" + _END),
    Kind("aws-secret-key", b"AccessKey", _AWS_SECRET, edge=False),
    Kind("aws-secret-key", b"ACCESS_KEY", _AWS_SECRET, edge=False),
    Kind("aws-secret-key", b"secret_access_key", _AWS_SECRET, edge=False),
    *(Kind("github-token", b"gh" + kind + b"_", rb"[A-Za-z0-9]{36,255}") for kind in (b"p", b"o", b"u", b"s", b"r")),
    Kind("github-fine-grained-token", b"github_pat_", rb"[A-Za-z0-9]{22}_[A-Za-z0-9]{40,100}"),
    *(Kind("gitlab-token", b"gl" + kind + b"-", _WORDS + rb"{20,64}") for kind in (b"pat", b"ptt", b"rt", b"dt")),
    Kind("anthropic-key", b"sk-ant-", rb"[a-z]{2,12}[0-9]{2}-" + _WORDS + rb"{32,160}"),
    Kind("openai-key", b"sk-proj-", _WORDS + rb"{40,200}"),
    Kind("openai-key", b"sk-svcacct-", _WORDS + rb"{40,200}"),
    Kind("openai-key", b"sk-admin-", _WORDS + rb"{40,200}"),
    Kind("openai-key", b"sk-", rb"[A-Za-z0-9]{32,64}" + _END),
    Kind("openrouter-key", b"sk-or-", rb"v1-[0-9a-f]{64}"),
    Kind("google-api-key", b"AIza", _WORDS + rb"{35}(?!" + _WORDS + rb")"),
    Kind("google-oauth-secret", b"GOCSPX-", _WORDS + rb"{28}"),
    Kind("google-access-token", b"ya29.", _WORDS + rb"{40,400}"),
    *(
        Kind("slack-token", b"xox" + kind + b"-", rb"[A-Za-z0-9-]{24,200}")
        for kind in (b"a", b"b", b"c", b"e", b"p", b"r", b"s")
    ),
    Kind("slack-token", b"xoxd-", rb"[A-Za-z0-9%/+=-]{24,400}"),
    Kind("slack-token", b"xapp-", rb"[A-Za-z0-9-]{24,200}"),
    Kind("slack-webhook", b"hooks.slack.com", _SLASH + rb"services" + _SLASH + _HOOK, edge=False),
    *(
        Kind("stripe-key", kind + b"_", rb"[A-Za-z0-9]{20,128}")
        for kind in (b"sk_live", b"rk_live", b"sk_test", b"rk_test")
    ),
    Kind("stripe-webhook-secret", b"whsec_", rb"[A-Za-z0-9+/]{32,64}"),
    Kind("npm-token", b"npm_", rb"[A-Za-z0-9]{36}" + _END),
    Kind("pypi-token", b"pypi-", rb"AgE" + _WORDS + rb"{50,400}"),
    Kind("huggingface-token", b"hf_", rb"[A-Za-z0-9]{34,40}" + _END),
    Kind("sendgrid-key", b"SG.", _WORDS + rb"{22}\." + _WORDS + rb"{43}"),
    Kind("telegram-token", b":AA", rb"(?<=[0-9]{8}:AA)" + _WORDS + rb"{33}(?!" + _WORDS + rb")", edge=False),
    Kind("jwt", b"eyJ", _WORDS + rb"{10,2000}\.eyJ" + _WORDS + rb"{10,4000}\." + _WORDS + rb"{16,1500}"),
    Kind("private-key", b"-----BEGIN ", _KEY, edge=False, long=True),
    Kind("age-secret-key", b"AGE-SECRET-KEY-", rb"1[0-9A-Z]{58}"),
    Kind("e2b-key", b"e2b_", rb"[0-9a-f]{40}" + _END),
    Kind("daytona-key", b"dtn_", rb"[0-9a-f]{64}" + _END),
    Kind("databricks-token", b"dapi", rb"[0-9a-f]{32}(?:-[0-9])?" + _END),
    *(Kind("digitalocean-token", kind + b"_v1_", rb"[0-9a-f]{64}" + _END) for kind in (b"dop", b"doo", b"dor")),
    Kind("groq-key", b"gsk_", rb"[A-Za-z0-9]{40,64}" + _END),
    Kind("xai-key", b"xai-", rb"[A-Za-z0-9]{64,100}" + _END),
    Kind("replicate-token", b"r8_", rb"[A-Za-z0-9]{37}" + _END),
    Kind("perplexity-key", b"pplx-", rb"[A-Za-z0-9]{40,64}" + _END),
    Kind("nvidia-key", b"nvapi-", _WORDS + rb"{60,80}"),
    Kind("tavily-key", b"tvly-", _WORDS + rb"{32,64}"),
    Kind("langsmith-key", b"lsv2_", rb"(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}" + _END),
    Kind("supabase-token", b"sbp_", rb"[0-9a-f]{40}" + _END),
    Kind("supabase-key", b"sb_secret_", _NO_NAME + _WORDS + rb"{22}_" + _WORDS + rb"{8}(?!" + _WORDS + rb")"),
    Kind("docker-token", b"dckr_pat_", _NO_NAME + _WORDS + rb"{24,64}"),
    Kind("linear-key", b"lin_api_", rb"[A-Za-z0-9]{40}" + _END),
    Kind("notion-token", b"ntn_", rb"[A-Za-z0-9]{40,60}" + _END),
    Kind("figma-token", b"figd_", _WORDS + rb"{40,64}"),
    Kind("grafana-token", b"glsa_", rb"[A-Za-z0-9]{32}_[0-9a-fA-F]{8}" + _END),
    Kind("atlassian-token", b"ATATT3", rb"[A-Za-z0-9_=-]{100,300}"),
    Kind("shopify-token", b"shpat_", rb"[0-9a-fA-F]{32}" + _END),
    Kind("vault-token", b"hvs.", _NO_NAME + _WORDS + rb"{24,200}"),
    Kind("doppler-token", b"dp.pt.", rb"[A-Za-z0-9]{40,44}" + _END),
    Kind("discord-webhook", b"webhooks", _SLASH + _DISCORD, edge=False),
    Kind("azure-key", b"AccountKey=", rb"([A-Za-z0-9+/]{86}==)", edge=False),
    Kind("azure-key", b"AccessKey=", rb"([A-Za-z0-9+/]{43}=)", edge=False),
    Kind("bearer-token", b"earer", _BEARER, edge=False),
    Kind("url-password", b"://", _URL, edge=False),
    Kind("url-password", b":\\/\\/", _URL, edge=False),
)


@lru_cache(maxsize=None)
def _compile(text: bytes) -> Pattern[bytes]:
    return re.compile(text)


@lru_cache(maxsize=None)
def _build_quick_patterns() -> Tuple[Tuple[Tuple[Pattern[bytes], Tuple[Kind, ...]], ...], Tuple[Kind, ...]]:
    """Return the literals in a few groups: those with the same rare last or first byte are searched together."""
    groups: Dict[bytes, List[Kind]] = {b"_": [], b"-": [], b"A": []}
    others: List[Kind] = []
    for kind in KINDS:
        first, last = kind.literal[:1], kind.literal[-1:]
        key = last if last in (b"_", b"-") else first
        (groups[key] if key in (last, b"A") and key in groups else others).append(kind)
    return tuple((re.compile(_join_literals(key, kinds)), tuple(kinds)) for key, kinds in groups.items()), tuple(others)


def _join_literals(key: bytes, kinds: List[Kind]) -> bytes:
    """Return one expression for the literals of a group."""
    texts = [re.escape(kind.literal) for kind in kinds]
    if key == b"A":
        return key + b"(?:" + b"|".join(text[1:] for text in texts) + b")"
    # Many names contain such a byte, and usually the two bytes before it belong to no literal.
    before = [b"".join(sorted({re.escape(kind.literal[at : at + 1]) for kind in kinds})) for at in (-3, -2)]
    return b"%b(?<=[%b][%b]%b)(?:%b)" % (key, *before, key, b"|".join(b"(?<=" + text + b")" for text in texts))


def _list_possible_kinds(data: bytes) -> List[Kind]:
    """Return the kinds whose literals are in the data."""
    groups, others = _build_quick_patterns()
    kinds = [kind for quick, kinds in groups if quick.search(data) for kind in kinds if kind.literal in data]
    return kinds + [kind for kind in others if kind.literal in data]


def may_hold(data: bytes) -> bool:
    """Return whether the data contains a credential, or the beginning of a long one."""
    return any(_contains(kind, data) for kind in _list_possible_kinds(data))


def _contains(kind: Kind, data: bytes) -> bool:
    """Return whether a kind is in the data; of a private key, its first line is enough."""
    return b"PRIVATE KEY" in data if kind.long else _compile(kind.text).search(data) is not None


def _find_span(kind: Kind, data: bytes, at: int) -> Tuple[int, int] | None:
    """Return where the next credential of a kind is."""
    for match in _compile(kind.text).finditer(data, at):
        if not kind.long:
            return match.span(1 if match.re.groups else 0)
        end = _find_key_end(data, match.end())
        if end:
            return match.start(), end
    return None


def _find_key_end(data: bytes, at: int) -> int:
    """Return where a private key ends whose first line ends at ``at``; 0 if no key follows.

    It ends with its last line, whatever is before and between the lines. Without a last line it ends with the last line
    that is a single word looking like part of a key.
    """
    dashes = data.find(b"-----", at, at + LONGEST_KEY)
    last = _compile(_LAST_LINE).match(data, dashes) if dashes >= 0 else None
    if last is not None and not _compile(_NO_KEY).search(data, at, dashes) and _is_key(data[at:dashes]):
        return last.end()
    lines = _compile(_KEY_LINES).match(data, at, at + LONGEST_KEY)
    return lines.end() if lines is not None else 0


def _is_key(between: bytes) -> bool:
    """Return whether the text between a first and a last line is a key, apart from indentation, quotes and comment signs."""
    told = _compile(_TOLD).match(between)
    lines = between[told.end() :] if told is not None else between
    key = sum(len(word) for word in _compile(_WORD).findall(lines))
    return key > 0 and key >= KEY_SHARE * len(_compile(_AROUND).sub(b"", lines))


Found = Callable[[int, str], None]
"""A callback that receives the line of each credential, counted in the result, and its kind."""


class CredentialFilter:
    """Feed it a text in pieces; it returns the text, with ``[redacted:KIND]`` for each credential if ``redact``."""

    def __init__(self, redact: bool, found: Found) -> None:
        self._redact = redact
        self._found = found
        self._buffer = b""
        self._context = 0
        """This many bytes of the buffer were already returned, and are only looked back at."""
        self._line = 1

    def feed(self, data: bytes, last: bool = False) -> bytes:
        """Take a piece and return what is certain to stay; with ``last``, all that is left."""
        # In small pieces: with many findings each costs as much as is searched together.
        pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)] or [b""]
        return b"".join([self._feed(piece, False) for piece in pieces[:-1]] + [self._feed(pieces[-1], last)])

    def _feed(self, data: bytes, last: bool) -> bytes:
        """Search one piece together with what was held back, and hold back its end."""
        buffer, at = self._buffer + data, self._context
        out: List[bytes] = []
        limit = len(buffer) if last else len(buffer) - HOLD
        kinds = _list_possible_kinds(buffer) if at < limit else []
        nexts: Dict[Kind, Tuple[int, int]] = {}
        while at < limit:
            best = self._find_next(buffer, at, kinds, nexts)
            if best is None or nexts[best][0] >= limit:
                self._emit(buffer[at:limit], out)
                at = limit
                break
            start, end = nexts[best]
            self._emit(buffer[at:start], out)
            self._found(self._line, best.name)
            if self._redact:
                mark = b"[redacted:%s]" % best.name.encode()
                out.append(mark)
                # What follows is examined as it will be stored: after the mark.
                limit -= end - len(mark)
                buffer, at = mark + buffer[end:], len(mark)
                nexts.clear()
            else:
                self._emit(buffer[start:end], out)
                at = end
        self._context = min(at, 8)
        self._buffer = buffer[at - self._context :]
        return b"".join(out)

    def _find_next(self, buffer: bytes, at: int, kinds: List[Kind], nexts: Dict[Kind, Tuple[int, int]]) -> Kind | None:
        """Return the kind whose next match begins first (the longest of those); the matches are kept in ``nexts``."""
        for kind in list(kinds):
            if kind in nexts and nexts[kind][0] >= at:
                continue
            span = _find_span(kind, buffer, at)
            if span is None:
                kinds.remove(kind)
            else:
                nexts[kind] = span
        return min(kinds, key=lambda kind: (nexts[kind][0], -nexts[kind][1]), default=None)

    def _emit(self, data: bytes, out: List[bytes]) -> None:
        out.append(data)
        self._line += data.count(b"\n")


def redact_name(text: str) -> Tuple[str, List[str]]:
    """Return a name as it may be shown, and the kinds of the credentials in it."""
    data = text.encode("utf-8", "surrogatepass")
    if not may_hold(data):
        return text, []
    kinds: List[str] = []
    left = CredentialFilter(True, lambda line, kind: kinds.append(kind)).feed(data, True)
    return left.decode("utf-8", "surrogatepass"), kinds
