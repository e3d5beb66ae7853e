"""Find credentials in text, and redact them: tokens by their form, secrets by the name before them, private keys, URLs.

Nearly all text contains none, so what counts is how quickly that is known. An expression that begins with one fixed byte
is searched about ten times as fast as any other, and a single byte faster still. So each kind of credential is found by
an anchor, a byte that all of them have in a certain place and that is not frequent in text: ``_`` in ``ghp_…``, ``=`` in
``PASSWORD=…``. What is around an anchor decides in two steps: an expression leaves few candidates, and a function examines
those.

``VERSION`` is raised with every change of what is found: what was exported before is then examined again.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Pattern, Sequence, Tuple

from sidecar.program.privacy.expressions import Expression
from sidecar.program.privacy.kinds import ENDS, LENGTHS, TOKENS

VERSION = 6
LONGEST_KEY = 128 * 1024
HOLD = LONGEST_KEY + 32 * 1024
"""No credential is longer: this many bytes are held back until it is known what follows them."""
CONTEXT = 256
"""No credential depends on more of what is before it."""
ROUNDS = 20
KEY_SHARE = 0.8
"""The share of the text between a key's first and last line that must be long words of base64; in other texts that
contain both lines it is much lower."""


class Span(NamedTuple):
    """Where a credential is, and its kind."""

    start: int
    end: int
    name: str
    by_name: bool = False
    """It is recognised by the name before it, not by its own form."""


class Rule(NamedTuple):
    """A kind of secret that a user added: ``pattern`` is matched where ``keyword`` is, whose case does not matter."""

    name: str
    keyword: bytes
    pattern: Pattern[bytes]
    width: int
    """The length of the longest text that the pattern matches."""


Rules = Tuple[Rule, ...]


def read_rules(rows: Iterable[Sequence[str]]) -> Rules:
    """Return the rules of a request: name, keyword, pattern and width of each. The config's reader has checked them."""
    return tuple(
        Rule(name, keyword.lower().encode(), re.compile(pattern.encode()), int(width))
        for name, keyword, pattern, width in rows
    )


# No part of a word although they may end in letters or digits: escapes of JSON and URLs, terminal colours.
_ESCAPE = Expression(rb"(?:\\[bfnrt]|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|%[0-9A-Fa-f]{2}|\[m|[\[;][0-9]{1,3}m)\Z")
_WORD_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")
_LOW_LINE = ord("_")
_TOKEN_BYTES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"


def _begins_word(data: bytes, at: int) -> bool:
    """Return whether no word continues at ``at``."""
    if not at or data[at - 1] not in _WORD_BYTES:
        return True
    if data[at - 1] == _LOW_LINE and (at == 1 or data[at - 2] not in _WORD_BYTES):
        return True  # emphasis in Markdown
    return _ESCAPE().search(data, max(0, at - 6), at) is not None


def _match_from(expression: Expression, data: bytes, at: int, name: str) -> Span | None:
    """Return what the expression matches at ``at``, if a word begins there."""
    found = expression().match(data, at) if at >= 0 and _begins_word(data, at) else None
    return Span(at, found.end(), name) if found is not None else None


def _find_token(data: bytes, at: int) -> Span | None:
    """Return the token whose beginning ends with the byte at ``at``."""
    if data[max(0, at - 2) : at + 1] not in ENDS:
        return None
    head = data[max(0, at + 1 - LENGTHS[0]) : at + 1]
    for length in LENGTHS:
        if length <= len(head) and head[-length:] in TOKENS:
            span = _find_token_from(data, at + 1 - length, head[-length:])
            if span is not None:
                return span
    return None


def _find_token_from(data: bytes, at: int, beginning: bytes) -> Span | None:
    """Return the token that begins at ``at`` with this beginning."""
    if not _begins_word(data, at):
        return None
    for name, rest in TOKENS[beginning]:
        found = rest().match(data, at + len(beginning))
        if found is not None:
            return Span(at, found.end(), name)
    return None


_JWT = Expression(
    rb"eyJ[A-Za-z0-9_-]{10,2000}\.(?:eyJ[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{16,1500}"
    rb"|[A-Za-z0-9_-]{40,1000}\.[A-Za-z0-9_-]{12,24}\.[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{16,64})"
)
_DISCORD = Expression(rb"[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,38}(?![A-Za-z0-9_-])")
_AIRTABLE = Expression(rb"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}(?![A-Za-z0-9])")
_DOPPLER = Expression(rb"dp\.st\.[a-z0-9_-]{2,35}\.[A-Za-z0-9]{40,44}(?![A-Za-z0-9])")
_TERRAFORM = Expression(rb"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_-]{60,70}")


def _find_dotted(data: bytes, at: int) -> Span | None:
    """Return the token that has a dot at ``at``: after its beginning, or between its parts."""
    before = data[max(0, at - 2100) : at]
    run = len(before) - len(before.rstrip(_TOKEN_BYTES))
    span: Span | None = None
    if run >= 13:
        span = _match_from(_JWT, data, data.find(b"eyJ", at - run, at), "jwt")
        span = span or _match_from(_AIRTABLE, data, at - 17, "airtable-token")
    elif run == 6:
        # The second dot of a Discord token, whose first part has 24 to 28 bytes.
        starts = (at - 7 - length for length in range(28, 23, -1))
        span = next(filter(None, (_match_from(_DISCORD, data, start, "discord-token") for start in starts)), None)
    elif run == 7:
        span = _match_from(_TERRAFORM, data, at - 22, "terraform-token")
    if span is None and data.startswith(b"dp.st.", at - run - 6):
        span = _match_from(_DOPPLER, data, at - run - 6, "doppler-token")
    return span or _find_token(data, at)


_AWS_SESSION = Expression(rb"IQoJb3JpZ2lu[A-Za-z0-9+/=]{80,2000}")
# "-----BEGIN … PRIVATE KEY" in base64, as Kubernetes has keys.
_ENCODED_KEY = Expression(
    rb"LS0tLS1CRUdJTi(?:BQUklWQVRFIEtFWS0|BSU0EgUFJJVkFURS|BFQyBQUklWQVRF|BPUEVOU1NIIFBSSVZBVEU|BFTkNSWVBURUQgUFJJVkFURS"
    rb"|BEU0EgUFJJVkFURS|BQR1AgUFJJVkFURS)[A-Za-z0-9+/=_-]{40,%d}" % (LONGEST_KEY // 2)
)


def _find_encoded(data: bytes, at: int) -> Span | None:
    """Return what is base64 of something secret, with a J at ``at``."""
    span = _match_from(_AWS_SESSION, data, at - 3, "aws-session-token")
    return span or _match_from(_ENCODED_KEY, data, at - 11, "private-key")


_NEWRELIC = Expression(rb"(?:[0-9a-f]{36}|[a-z]{2}[0-9]{2}xx[0-9a-f]{30})NRAL(?![A-Za-z0-9])")
_TELEGRAM = Expression(rb"(?<=[0-9]{8}):AA[A-Za-z0-9_-]{33}(?![A-Za-z0-9_-])")
_FIREBASE = Expression(rb"APA91b[A-Za-z0-9_-]{100,200}")
_FACEBOOK = Expression(rb"EAA[CM][A-Za-z0-9]{100,300}(?![A-Za-z0-9+/=])")
_FROM_A = (b"AKIA", b"ASIA", b"ABIA", b"AIza", b"ATBB", b"ATATT3", b"ATCTT3", b"AKCp")


def _find_capital_a(data: bytes, at: int) -> Span | None:
    """Return the token that has an A at ``at``."""
    if data.startswith(b"AL", at):
        return _match_from(_NEWRELIC, data, at - 38, "newrelic-key")
    if data.startswith(b":AA", at - 1):
        found = _TELEGRAM().match(data, at - 1)
        return Span(at - 1, found.end(), "telegram-token") if found is not None else None
    if data.startswith(b"AP", at):
        return _match_from(_FIREBASE, data, at, "firebase-key")
    if data.startswith(b"EAA", at - 1):
        # Not in the middle of base64, in which chance writes it too.
        return None if data[at - 2 : at - 1] in (b"+", b"/") else _match_from(_FACEBOOK, data, at - 1, "facebook-token")
    beginning = next((one for one in _FROM_A if data.startswith(one, at)), b"")
    return _find_token_from(data, at, beginning) if beginning else None


_TWILIO = Expression(rb"SK[0-9a-f]{32}(?![A-Za-z0-9])")
_EASYPOST = Expression(rb"EZ[AT]K[A-Za-z0-9]{54}(?![A-Za-z0-9])")
_AZURE_SECRET = Expression(rb"[A-Za-z0-9_.~-]{3}[0-9]Q~[A-Za-z0-9_.~-]{31,34}(?![A-Za-z0-9_.~-])")


def _find_capital_k(data: bytes, at: int) -> Span | None:
    span = _match_from(_TWILIO, data, at - 1, "twilio-key")
    return span or _match_from(_EASYPOST, data, at - 3, "easypost-key")


def _find_azure(data: bytes, at: int) -> Span | None:
    return _match_from(_AZURE_SECRET, data, at - 5, "azure-secret")


def _find_databricks(data: bytes, at: int) -> Span | None:
    return _find_token_from(data, at - 2, b"dapi")


_BEARER = Expression(rb"earer[ ]{1,4}((?=[A-Za-z._~+/-]{0,64}[0-9])[A-Za-z0-9._~+/-]{24,2000}(?<![.])={0,2})")


def _find_bearer(data: bytes, at: int) -> Span | None:
    found = _BEARER().match(data, at)
    return Span(*found.span(1), "bearer-token") if found is not None else None


_PLACEHOLDER = rb"(?:\$\(?[A-Za-z_][A-Za-z0-9_]{0,63}\)?|%\([A-Za-z0-9_]{1,64}\)s|\*+|\.+)@"
_URL = Expression(
    rb"[^\s/?#:@\"'\\<>\[\]]{0,64}:(?!" + _PLACEHOLDER + rb")([^\s/?#@\"'\\<>\[\]{}]{3,512})"
    rb"@(?!sha[0-9]{3}:)[A-Za-z0-9_\[${%]"
)
_URL_TOKEN = Expression(rb"(?=[A-Za-z_-]{0,254}[0-9])([0-9a-f]{32}|[A-Za-z0-9_-]{36,255})@[A-Za-z0-9_\[]")
_SLASH = rb"\\{0,8}/"
_SLACK_HOOK = Expression(
    rb"hooks\.slack\.com" + _SLASH + rb"(?:services|workflows)" + _SLASH
    + rb"([A-Z0-9]{8,14}" + _SLASH + rb"[A-Z0-9]{8,14}" + _SLASH + rb"[A-Za-z0-9/]{20,60})"
)  # fmt: skip
_DISCORD_HOOK = Expression(rb"webhooks" + _SLASH + rb"[0-9]{17,20}" + _SLASH + rb"([A-Za-z0-9_-]{60,80})")
_TEAMS_HOOK = Expression(
    rb"webhookb2"
    + _SLASH
    + rb"([0-9a-f-]{36}@[0-9a-f-]{36}"
    + _SLASH
    + rb"IncomingWebhook(?:"
    + _SLASH
    + rb"[A-Za-z0-9_-]{16,64}){1,3})"
)
_HOOKS = (("slack-webhook", _SLACK_HOOK), ("discord-webhook", _DISCORD_HOOK), ("teams-webhook", _TEAMS_HOOK))


def _find_after_slash(data: bytes, at: int) -> Span | None:
    """Return the secret of a URL that has a slash at ``at``: before its host, or in a webhook's path."""
    if data.startswith(b":/", at - 2) or data.startswith(b":\\/\\", at - 4):
        for name, expression in (("url-password", _URL), ("url-token", _URL_TOKEN)):
            found = expression().match(data, at + 1)
            if found is not None:
                return Span(*found.span(1), name)
        return None
    for name, expression in _HOOKS:
        found = expression().search(data, max(0, at - 45), at + 400)
        if found is not None and found.start() < at < found.end():
            return Span(*found.span(1), name)
    return None


LAST_LETTERS = frozenset(b"ord rds swd pwd ase ass ret ets key ken ial als ens jwt ata uth ion kie ies sig ure".split())
"""The last three letters of the names in ``assignments.py``. A test compares them."""


def _find_assigned(data: bytes, name_end: int, at: int, sign: bytes) -> Span | None:
    """Return the secret after a sign, if the name before it says that it is one."""
    # Most names are ruled out here, and ``assignments`` is seldom needed.
    last = data[max(0, name_end - 20) : name_end].rstrip(b" \t?\"'`\\]*")[-3:]
    if last.lower() not in LAST_LETTERS and not last[1:].isupper() and not last[-1:].isdigit():
        return None
    from sidecar.program.privacy.assignments import find_secret

    found = find_secret(data, name_end, at, sign)
    return Span(*found, True) if found is not None else None


def _find_after_colon(data: bytes, at: int) -> Span | None:
    return _find_assigned(data, at, at + 1 + data.startswith(b"=", at + 1), b":")


def _find_after_equals(data: bytes, at: int) -> Span | None:
    return _find_assigned(data, at, at + 1 + data.startswith(b">", at + 1), b"=")


def _find_after_escape(data: bytes, at: int) -> Span | None:
    """Return the secret after an escaped equals sign that has its 3 at ``at``: ``\\u003d``, ``\\x3d``, ``%3D``."""
    start = max(data.rfind(b"\\", max(0, at - 5), at), data.rfind(b"%", max(0, at - 1), at))
    return _find_assigned(data, start, at + 2, b"=") if start >= 0 else None


def _find_after_tag(data: bytes, at: int) -> Span | None:
    return _find_assigned(data, at, at + 1, b">")


_OPTION = Expression(rb"--[a-z][a-z-]{1,24}[ ]")
_USER = Expression(rb"-(?:u|-user)[ =]{1,2}[\"']?[^\s:\"']{1,64}:([^\s\"'\\:]{4,200})")
_SSHPASS = Expression(rb"-p[ ]{1,2}[\"']?([^\s\"'\\]{4,200})")


def _find_after_hyphen(data: bytes, at: int) -> Span | None:
    """Return the token, or the secret that is given to a command as an option: ``--password x``, ``curl -u name:x``,
    ``sshpass -p x``."""
    span = _find_token(data, at)
    if span is not None:
        return span
    found = _OPTION().match(data, at)
    if found is not None:
        span = _find_assigned(data, found.end() - 1, found.end(), b" ")
        if span is not None:
            return span
    found = _USER().match(data, at)
    if found is not None and b"curl" in data[max(0, at - 200) : at]:
        return None if found.group(1).isdigit() else _take_value(found, "basic-auth")
    found = _SSHPASS().match(data, at) if data.startswith(b"sshpass ", at - 8) else None
    return _take_value(found, "password") if found is not None else None


def _take_value(found: re.Match[bytes], name: str) -> Span | None:
    """Return the first group of a match, unless it stands for something else."""
    from sidecar.program.privacy.assignments import is_placeholder

    return None if is_placeholder(found.group(1)) else Span(*found.span(1), name, True)


_KEY = rb"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_FIRST_LINE, _LAST_LINE = Expression(rb"-----BEGIN " + _KEY), Expression(rb"-----END " + _KEY)
_NO_KEY = Expression(rb"[][{}\0]")
_KEY_WORD = rb"(?:[A-Za-z0-9+/=]|\\{1,8}/){16,16384}(?![A-Za-z0-9+/=])"
_LINE_END = rb"(?:\r?\n|\r|(?:\\{1,8}r)?\\{1,8}n)"
_NEXT = rb"[ \t\"',;+]{0,8}(?:" + _LINE_END + rb"[ \t>|#*;\"',]{0,80}){1,4}"
_HEADERS = rb"(?:" + _NEXT + rb"[A-Za-z-]{2,20}: [^\r\n\\]{0,200}){0,4}"
_ALONE = rb"(?=[ \t]{0,8}(?:" + _LINE_END + rb"|\\{0,8}[\"']|[`<]|-----|\Z|[A-Za-z0-9+/=]{32}))"
_KEY_LINES = Expression(
    _HEADERS + rb"(?:(?:" + _NEXT + rb"|[ \t]{0,8})" + _KEY_WORD + _ALONE + rb")+"
    rb"(?:" + _NEXT + rb"(?:[A-Za-z0-9+/]{0,15}={1,2}|=[A-Za-z0-9+/]{4})(?![A-Za-z0-9+/=])){0,2}"
)
_KEY_HEADERS, _KEY_WORDS = Expression(_HEADERS), Expression(_KEY_WORD)
_AROUND = Expression(rb"\\{1,8}[nrt\"'/]|[\s>|#*;\"',+`]+")


def _match_first_line(data: bytes, at: int) -> re.Match[bytes] | None:
    """Match the first line of a private key, which has the V of PRIVATE at ``at``."""
    start = data.rfind(b"-----BEGIN ", max(0, at - 60), at)
    return _FIRST_LINE().match(data, start) if start >= 0 else None


def _find_key(data: bytes, at: int) -> Span | None:
    """Return the private key whose first line has the V of PRIVATE at ``at``."""
    first = _match_first_line(data, at)
    end = _find_key_end(data, first.end()) if first is not None else 0
    return Span(first.start(), end, "private-key") if first is not None and end else None


def _find_key_end(data: bytes, at: int) -> int:
    """Return where a private key ends whose first line ends at ``at``; 0 if no key follows.

    It ends with its last line, whatever is before and between the lines. Without a last line it ends with the last line
    that is a single word looking like part of a key.
    """
    dashes = data.find(b"-----", at, at + LONGEST_KEY)
    last = _LAST_LINE().match(data, dashes) if dashes >= 0 else None
    if last is not None and not _NO_KEY().search(data, at, dashes) and _is_key(data[at:dashes]):
        return last.end()
    lines = _KEY_LINES().match(data, at, at + LONGEST_KEY)
    return lines.end() if lines is not None else 0


def _is_key(between: bytes) -> bool:
    """Return whether the text between a first and a last line is a key, apart from indentation, quotes and comment signs."""
    headers = _KEY_HEADERS().match(between)
    lines = between[headers.end() :] if headers is not None else between
    key = sum(len(word) for word in _KEY_WORDS().findall(lines))
    return key > 0 and key >= KEY_SHARE * len(_AROUND().sub(b"", lines))


# What follows the beginning of a token: not the rest of a name in code, whose letters are all small or all capitals.
_REST = rb"(?=[A-Za-z0-9_%/+=-]{16})(?![a-z_-]{20}|[a-z_-]{16}[^A-Za-z0-9_-]|[A-Z_-]{16})"
# What follows a sign: at least six bytes that may be a value, the scheme of a header, or a cookie.
_SCHEMES = rb"(?:[BbTt](?:asic|oken|ot)|SSWS|Key) "
_SOME = rb"(?=[=>]?[ \t*]{0,8}\\{0,16}[\"'`]?(?:[^\s\"'`,;(){}<>\[\]]{6}|" + _SCHEMES + rb"|[A-Za-z0-9_-]{1,5}=))"
# The last three letters of the names in ``assignments.py``: which each of them may be, checked quickly, then exactly.
_ROUGHLY = rb"[oOrRsSpPaAeEkKiIjJuU][rRdDwWsSeEtTaAiInNlLoO][dDsSeEtTnNyYlLhHaAgG]"
_EXACTLY = rb"(?i:ord|rds|[sp]wd|as[es]|ret|ets|ke[yn]|ial|als|ens|jwt|ata|uth|ion|kie|ies|sig|ure)"


def _after_name(sign: bytes) -> bytes:
    """Return an expression for a sign after a name with these last letters. Quotes, brackets and blanks may be between
    them; of longer ones, as in JSON in JSON in JSON, only the last two bytes are checked here."""
    look = b"(?<=%b" + sign + b")"
    closed, twice = rb"[\"'` *?\]]", rb"[\\\"'`*\]]" + rb"[\0-\xff]"
    longer = look % rb"(?:\\\\[\"']|[\"']\] )" + rb"|" + look % rb"[A-Z_][A-Z0-9]"
    rough = rb"(?:" + look % closed + rb"(?:" + look % (_ROUGHLY + closed) + rb"|" + look % twice + rb")"
    rough += rb"|" + look % _ROUGHLY + rb"|" + look % rb"[A-Z_][A-Z0-9]" + rb")"
    exact = rb"|".join(look % (_EXACTLY + between) for between in (b"", closed, twice))
    return sign + rough + _SOME + rb"(?:" + exact + rb"|" + longer + rb")"


# An anchor, the expression around it, and what examines a candidate. Expressions match the anchor alone and only look at
# the rest, so that no other anchor is passed over.
_SEARCHES: Tuple[Tuple[bytes, Expression, Callable[[bytes, int], "Span | None"]], ...] = (
    (b"_", Expression(rb"_" + _REST), _find_token),
    (
        b"-",
        Expression(
            rb"-(?:(?<![0-9a-f]{4}-)" + _REST + rb"|(?=-[a-z][a-z-]{1,24} [^ -]|(?:u|-user)[ =]|p )(?<![A-Za-z0-9_-]-))"
        ),
        _find_after_hyphen,
    ),
    (b".", Expression(rb"\.(?=[A-Za-z0-9_-]{16})(?![a-z_]{20}|[a-z_]{16}[^A-Za-z0-9_-])"), _find_dotted),
    (
        b"A",
        Expression(
            rb"A(?=[KSB]IA|Iza|T(?:BB|[AC]TT3)|KCp|L(?<=[0-9a-f]NRAL)|(?<=:A)(?:A[A-Za-z0-9_-]{33}|PA91b)|(?<=EA)A[CM][A-Za-z0-9]{100})"
        ),
        _find_capital_a,
    ),
    (b"J", Expression(rb"J(?:(?=b3JpZ2lu)(?<=IQoJ)|(?=Ti)(?<=LS0tLS1CRUdJ))"), _find_encoded),
    (b"K", Expression(rb"K(?:(?=[0-9a-f]{32})(?<=SK)|(?=[A-Za-z0-9]{54})(?<=EZ[AT]K))"), _find_capital_k),
    (b"V", Expression(rb"V(?=ATE KEY)(?<=PRIV)"), _find_key),
    (b"~", Expression(rb"~(?=[A-Za-z0-9_.~-]{31})(?<=[0-9]Q~)"), _find_azure),
    (
        b"/",
        Expression(rb"/(?:(?=[0-9]{17}|T[A-Z0-9]{7}|[0-9a-f]{8}-)|(?<=[/\\]/)(?=[^\s/@\"']{1,600}@))"),
        _find_after_slash,
    ),
    (b"p", Expression(rb"p(?=i[0-9a-f]{32})(?<=dap)"), _find_databricks),
    (b"earer ", Expression(rb"e(?=arer )"), _find_bearer),
    (b":", Expression(_after_name(rb":")), _find_after_colon),
    (b"=", Expression(_after_name(rb"=")), _find_after_equals),
    (b"3", Expression(rb"3(?=[dD])(?:(?<=\\u003)|(?<=\\x3)|(?<=%3))"), _find_after_escape),
    (b">", Expression(rb">(?=[^<\s]{6,200}</)(?<=[A-Za-z]>)"), _find_after_tag),
)


SELDOM = 8192
"""An anchor that is seen less often than once in so many bytes is looked for by ``find``, which passes over all others ten
times as fast as an expression does, and is slower for each that it finds."""


def _iterate_candidates(data: bytes, anchor: bytes, expression: Expression) -> Iterator[int]:
    """Yield where the expression matches. Each match begins with the anchor."""
    at = data.find(anchor)
    if at < 0:
        return
    match, find = expression().match, data.find
    for _ in range(len(data) // SELDOM + 1):
        if match(data, at) is not None:
            yield at
        at = find(anchor, at + 1)
        if at < 0:
            return
    for found in expression().finditer(data, at):
        yield found.start()


def has_candidate(data: bytes, anchor: bytes, expression: Expression) -> bool:
    """Return whether the expression, which begins with the anchor, matches anywhere."""
    return next(_iterate_candidates(data, anchor, expression), None) is not None


def may_begin_key(data: bytes) -> bool:
    """Return whether the data contains the first line of a private key."""
    anchor, expression, _ = next(row for row in _SEARCHES if row[2] is _find_key)
    return any(_match_first_line(data, at) is not None for at in _iterate_candidates(data, anchor, expression))


def find_spans(data: bytes, rules: Rules = ()) -> Iterator[Span]:
    """Yield the credentials in some text, in no order; some may overlap."""
    for anchor, expression, find in _SEARCHES:
        end = 0
        for at in _iterate_candidates(data, anchor, expression):
            if at < end:
                continue  # it is within one that was found
            span = find(data, at)
            if span is not None:
                end = span.end
                yield span
    yield from _find_by_rules(data, rules)


def _find_by_rules(data: bytes, rules: Rules) -> Iterator[Span]:
    """Yield what the user's own rules match."""
    for at, match in _find_keywords(data, rules):
        yield from match(data, at)


def _find_keywords(data: bytes, rules: Rules) -> Iterator[Tuple[int, Callable[[bytes, int], List[Span]]]]:
    """Yield where keywords of rules are, each with what matches its rule there."""
    small = data.lower() if rules else b""
    for rule in rules:
        at = small.find(rule.keyword)
        while at >= 0:
            yield at, partial(_match_rule, rule)
            at = small.find(rule.keyword, at + 1)


def _match_rule(rule: Rule, data: bytes, at: int) -> List[Span]:
    """Return what a rule whose keyword is at ``at`` matches there."""
    spans = []
    # Where the search ends, an expression sees the end of the text; so it ends far behind what can match.
    for found in rule.pattern.finditer(data, max(0, at - 2 * rule.width), at + 2 * rule.width + CONTEXT):
        if found.start() <= at < found.end():
            group = 1 if rule.pattern.groups and found.group(1) else 0
            spans.append(Span(*found.span(group), rule.name))
    return spans


def may_hold(data: bytes, rules: Rules = ()) -> bool:
    """Return whether the data contains a credential, or the beginning of a private key, which may be cut off."""
    return any(examine(data, at) for at, examine in find_traces(data, rules))


def find_traces(data: bytes, rules: Rules = ()) -> Iterator[Tuple[int, Callable[[bytes, int], object]]]:
    """Yield where there is what a credential is found by, in no order, each with what tells whether there is one (or the
    beginning of a private key). Elsewhere there is none, in any part of the data, wherever that begins and ends."""
    for anchor, expression, find in _SEARCHES:
        examine = _match_first_line if find is _find_key else find
        trace = _TRACES.get(find)
        for at in _iterate_candidates(data, anchor, expression):
            if trace is None or trace(data, at):
                yield at, examine
    yield from _find_keywords(data, rules)


def _ends_beginning(data: bytes, at: int) -> bool:
    """Return whether the beginning of a token ends with the byte at ``at``."""
    head = data[max(0, at + 1 - LENGTHS[0]) : at + 1]
    return head[-3:] in ENDS and any(head[-length:] in TOKENS for length in LENGTHS if length <= len(head))


def _may_be_option(data: bytes, at: int) -> bool:
    """Return whether the hyphen at ``at`` belongs to a token, or to an option that a secret may follow."""
    if _ends_beginning(data, at):
        return True
    if not data.startswith(b"--", at):
        return data.startswith((b"-u", b"-p "), at)
    found = _OPTION().match(data, at)
    return data.startswith(b"--user", at) or (found is not None and _may_be_name(data, found.end() - 1))


def _may_be_name(data: bytes, name_end: int) -> bool:
    """Return whether what is before a sign may be the name of a secret."""
    from sidecar.program.privacy.assignments import ends_with_name

    return ends_with_name(data, name_end)


_TRACES: Dict[Callable[[bytes, int], "Span | None"], Callable[[bytes, int], bool]] = {
    _find_token: _ends_beginning,
    _find_after_hyphen: _may_be_option,
    _find_after_colon: _may_be_name,
    _find_after_equals: _may_be_name,
}
"""What of a candidate does not depend on where the text begins and ends."""


def choose_spans(spans: Iterable[Span]) -> List[Span]:
    """Return the spans in order and without overlaps: the first ones, and of those that begin together the longest."""
    chosen: List[Span] = []
    for span in sorted(spans, key=lambda one: (one.start, -one.end, one.by_name)):
        if not chosen or span.start >= chosen[-1].end:
            chosen.append(span)
    return chosen


Found = Callable[[int, str], None]
"""A callback that receives the line of each credential, counted in the result, and its kind."""
_Marks = List[Tuple[int, str]]


class CredentialFilter:
    """Feed it a text in pieces; it returns the text, with ``[redacted:KIND]`` for each credential if ``redact``.

    ``keep_length``: a mark has as many bytes as what it replaces, because in binary data other bytes say how long that is.
    """

    def __init__(self, redact: bool, found: Found, rules: Rules = (), keep_length: bool = False) -> None:
        self._redact = redact
        self._found = found
        self._rules = rules
        self._keep_length = keep_length
        self._buffer = b""
        self._context = 0
        """This many bytes of the buffer were already returned, and are only looked back at."""
        self._line = 1

    def feed(self, data: bytes, last: bool = False) -> bytes:
        """Take a piece and return what is certain to stay; with ``last``, all that is left."""
        buffer, begin = self._buffer + data, self._context
        limit = len(buffer) if last else max(begin, len(buffer) - HOLD)
        marks: _Marks = []
        for _ in range(ROUNDS if self._redact else 1):
            # A credential may begin where another one ended, which only shows once that is redacted: once more.
            spans = [span for span in choose_spans(find_spans(buffer, self._rules)) if begin <= span.start < limit]
            if limit == begin or not spans:
                break
            if self._redact:
                buffer, limit, marks = self._replace(buffer, limit, spans, marks)
            else:
                marks, limit = [(span.start, span.name) for span in spans], max(limit, spans[-1].end)
        self._report(buffer, begin, limit, marks)
        self._context = min(limit, CONTEXT)
        self._buffer = buffer[limit - self._context :]
        return buffer[begin:limit]

    def _replace(self, buffer: bytes, limit: int, spans: List[Span], marks: _Marks) -> Tuple[bytes, int, _Marks]:
        """Return the buffer with marks for the spans, and where the limit and all marks are in it now."""
        out: List[bytes] = []
        moved: _Marks = []
        length = at = number = 0
        for span in spans:
            while number < len(marks) and marks[number][0] < span.end:
                where, name = marks[number]
                moved += [(length + where - at, name)] if where < span.start else []
                number += 1
            mark = self._make_mark(span)
            out += [buffer[at : span.start], mark]
            length += span.start - at
            moved.append((length, span.name))
            length += len(mark)
            at = span.end
        moved += [(length + where - at, name) for where, name in marks[number:]]
        return b"".join([*out, buffer[at:]]), length + max(0, limit - at), moved

    def _make_mark(self, span: Span) -> bytes:
        mark, length = b"[redacted:%s]" % span.name.encode(), span.end - span.start
        if not self._keep_length:
            return mark
        return mark.ljust(length, b"*") if len(mark) <= length else b"*" * length

    def _report(self, buffer: bytes, begin: int, limit: int, marks: _Marks) -> None:
        """Tell of the findings, each with its line, and count the lines that are returned."""
        at = begin
        for where, name in marks:
            self._line += buffer.count(b"\n", at, where)
            at = where
            self._found(self._line, name)
        self._line += buffer.count(b"\n", at, limit)


def redact_name(text: str, rules: Rules = ()) -> Tuple[str, List[str]]:
    """Return a name as it may be shown, and the kinds of the credentials in it.

    What is recognised by the name before it does not count: a file that is called ``token=abc123.md`` is no secret.
    """
    data = text.encode("utf-8", "surrogatepass")
    spans = choose_spans(span for span in find_spans(data, rules) if not span.by_name)
    out, at = [], 0
    for span in spans:
        out += [data[at : span.start], b"[redacted:%s]" % span.name.encode()]
        at = span.end
    shown = b"".join([*out, data[at:]]).decode("utf-8", "surrogatepass") if spans else text
    return shown, [span.name for span in spans]
