"""Secrets that are recognised by the name before them: ``DB_PASSWORD=…``, ``"api_key": "…"``, headers, cookies.

The name alone proves little, because code is full of ``token = next_token``. So the value has to look like a secret too:
not like a name, a call, a type, a path or a placeholder. A line of an environment file (``DB_PASSWORD=…``) is certain to
have a value and not code, so less is asked of it.
"""

from __future__ import annotations

import base64
from typing import Dict, NamedTuple, Tuple

from sidecar.program.privacy.expressions import Expression

NAME = 64
"""So many bytes before the sign are searched for a name."""
LONGEST = 4096
"""No value without quotes is longer."""
EXAMINED = 200
"""So much of a value says what it is."""

PASSWORD, SECRET, API_KEY, ANY_KEY, TOKEN = "password", "secret", "api-key", "key", "token"
COOKIE, BASIC, HEADER, SIGNATURE, KEY_DATA = "cookie", "basic-auth", "authorization", "signed-url", "private-key"
# Names without blanks, hyphens, underscores and dots, in small letters. A longer name may end with one of them.
_NAMES = {
    PASSWORD: "password passwords passwd passphrase pwd",
    SECRET: "secret secrets secretkey secretkeybase credential credentials",
    API_KEY: (
        "apikey accesskey authkey accountkey encryptionkey signingkey masterkey servicekey servicerolekey licensekey"
        " storagekey subscriptionkey appkey applicationkey clientkey serverkey adminkey deploykey sharedkey presharedkey"
        " sessionkey webhookkey writekey privatekey consumerkey integrationkey ingestkey securitykey rootkey recoverykey"
        " fastlykey"
    ),
    TOKEN: "token tokens jwt",
    KEY_DATA: "clientkeydata",
    BASIC: "auth",
    HEADER: "authorization",
    COOKIE: "cookie cookies",
    SIGNATURE: "sig signature",
}
_KINDS = {name.encode(): kind for kind, names in _NAMES.items() for name in names.split()}
_BY_END: Dict[bytes, Tuple[bytes, ...]] = {}
"""The names by their last three letters, the longest first."""
for _name in sorted(_KINDS, key=len, reverse=True):
    _BY_END[_name[-3:]] = (*_BY_END.get(_name[-3:], ()), _name)
_CLOSING = b" \t?\"'`\\]*"
"""What may be between a name and its sign."""
_NO_SECRETS = tuple(
    b"pagetoken nexttoken continuationtoken synctoken cancellationtoken endtoken starttoken stoptoken padtoken unktoken"
    b" bostoken eostoken masktoken septoken clstoken specialtokens maxtokens inputtokens outputtokens".split()
)
_PASS = (b"_PASS", b"_pass", b"-pass", b"?pass", b"&pass")
_SUFFIX = Expression(
    rb"(?:_(?:PROD|PRODUCTION|STAGING|STAGE|DEV|TEST|LIVE|VALUE|HASH|OLD|NEW|B64|BASE64)|_?[0-9]{1,3})\Z"
)
# The last part of something longer: a type (AWS::IAM::AccessKey), an ARN (arn:…:secret:…).
# But not a variable of PowerShell ($env:NAME).
_QUALIFIED = Expression(rb"(?<!\$[eE][nN])[A-Za-z0-9*:]:[A-Za-z0-9_.-]+\Z")
# A parameter of a URL.
_PARAMETER = Expression(rb"[?&][A-Za-z0-9_.-]+\Z")
_CAPITALS = Expression(rb"(?:\A|[^A-Za-z0-9_.-])[A-Z][A-Z0-9_]*\Z")
_OWN_TOKEN = Expression(rb"(?i)(?:\A|[^a-z0-9_-]|auth|access|api|refresh|session|bearer|secret|bot)[_-]?token\Z")

# A value in quotes; in quotes that are escaped themselves, as in JSON in a string; and one without quotes.
_QUOTED = (
    rb"[bBrRuU]{0,2}(?:\"([^\"\\\s]*(?:\\[^\s][^\"\\\s]*)*)\"|'([^'\\\s]*(?:\\[^\s][^'\\\s]*)*)'|`([^`\\\s]*)`"
    rb"|(\\{1,16}[\"'])([^\s\"'\\]*(?:\\+[^\s\"'\\][^\s\"'\\]*)*)\4)"
)
_PLAIN = rb"([^\0-\x20\"'`\\,;&|<>(){}\[\]]{5,%d})(?=([\0-\xff]?))" % LONGEST
# A text may be cut off after an opening quote.
_VALUE = Expression(rb"[ \t*]{0,8}(?:" + _QUOTED + rb"|(?:\\{0,16}[\"'](?=[^\0-\x20\"'\\]*\Z))?" + _PLAIN + rb")")
_OPENING = rb"[ \t]{0,4}\\{0,16}[\"'`]?[ \t]{0,4}"
_PAIR = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}=[^\0-\x20;,\"'\\]{1,4096}"
_COOKIES = Expression(_OPENING + rb"(" + _PAIR + rb"(?:;[ ]?" + _PAIR + rb"){0,100})")
_SCHEME = Expression(_OPENING + rb"(?:([A-Za-z][A-Za-z0-9-]{1,20})[ ]{1,4})?([^\0-\x20\"'`\\,;<>{}()\[\]]{8,4096})")

_WORDS = frozenset(
    b"""password passwd pass passphrase passwort secret token test tests testing tester admin administrator root guest user
    username login none null nil true false undefined string bytes number integer boolean object optional required default
    foo foobar bar baz key value apikey private public changeit sample mock fake unknown empty missing invalid valid hidden
    masked omitted removed redacted input output text data result response request param params args kwargs self this new
    old current prompt encrypted plain hashed salted base64 bearer basic oauth oauth2 sha256 sha512 md5 aes256 utf8 postgres
    mysql redis mongodb rabbitmq minio elastic demo supersecret topsecret notasecret mypassword mypass mysecret mytoken
    newpassword oldpassword userpassword dbpassword localhost abcdef expired protected disabled enabled forgotten changed
    reset""".split()
)
_TEMPLATE = Expression(
    rb"(?i)\$\{|\{\{|your[_-]?|placeholder|xxxxxxxx|\[redacted|\[private|process\.env|os\.environ|getenv"
)
_SHORT_TEMPLATE = Expression(
    rb"(?i)\$\(|%\(|%[sd]|\{[a-z_0-9.]*\}|<[a-z]|\.\.\.|change[_-]?me|(?-i:xxxx|XXXX)|example|replace[_-]?|insert[_-]?|dummy"
    rb"|\*\*\*|to-?do|fixme|not-?a-?real|deadbeef"
)
_NO_BEGINNINGS = tuple(b"$ < [ { % ./ ../ ~/ @ ! ^ # & = arn: file: vault: env: ref:".split())
_NO_ENDS = tuple(
    b".json .txt .key .pem .py .js .ts .go .rs .md .yaml .yml .toml .env .html .sh .cfg .conf .ini .com .org .net .io .dev"
    b" .local".split()
)
_ABOUT = Expression(rb"passw|secret|token|key\Z|required|invalid|optional")
_LINE_ENDS = (b"", b"\n", b"\r", b"\\", b'"', b"'")
_ESCAPED_ENDS = Expression(rb"(?:\\+[nrt])+\Z")
_DOTTED = Expression(rb"[A-Za-z_$][A-Za-z0-9_$]{0,40}[?!]?(?:(?:\.|->|::)[A-Za-z_$][A-Za-z0-9_$]{0,40}[?!]?)+\Z")
_IDENTIFIER = Expression(rb"[A-Za-z_$][A-Za-z0-9_$]*\Z")
_CAMEL = Expression(rb"[A-Za-z]?[a-z]+(?:[A-Z]+[a-z]*)+[0-9]{0,6}\Z")
_PART = Expression(rb"[A-Za-z0-9]+")
_RUN = Expression(rb"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_CHANGE = Expression(rb"(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])")
_DIGIT = Expression(rb"[0-9]")
_UUID = Expression(rb"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\Z")
_HEX = Expression(rb"(?=[a-f]{0,31}[0-9])[0-9a-f]{32,}\Z")
_BASE64 = Expression(rb"[A-Za-z0-9+/_-]{8,}={0,2}\Z")
_SIGNED = Expression(rb"(?:[0-9A-Fa-f]{64,}|[A-Za-z0-9/+_%-]{40,})(?:=|%3[dD]){0,2}\Z")
_AWS_SECRET = Expression(rb"[A-Za-z0-9/+]{40}\Z")
_AZURE_KEY = Expression(rb"[A-Za-z0-9/+]{43}(?:[A-Za-z0-9/+]{43}=)?=\Z")

Assigned = Tuple[int, int, str]
"""Where a secret begins and ends, and its kind."""


class _Way(NamedTuple):
    """How a value is written."""

    quoted: bool
    sign: bytes
    certain: bool = False
    """It is a value and not code: a line of an environment file, or the text of an XML element."""
    plain: bool = False
    """It is all that follows a colon on its line, as in YAML and in notes, or a parameter of a URL."""
    apart: bool = False
    """It is an option of a command, or all that follows an equals sign without blanks, as in settings."""

    @property
    def literal(self) -> bool:
        """It is hardly an expression."""
        return self.quoted or self.certain or self.plain


def find_secret(data: bytes, name_end: int, at: int, sign: bytes) -> Assigned | None:
    """Return the secret that begins at ``at``, if the name before ``name_end`` and its own form say that it is one.

    ``sign`` is what is between them: ``:`` or ``=``, ``>`` for the end of an XML tag, a blank after a command's option.
    """
    head = data[max(0, name_end - NAME) : name_end].rstrip(b" \t?")
    name = head.rstrip(_CLOSING)
    kind = _find_kind(name)
    if not kind:
        return None
    if kind == COOKIE:
        return _find_cookies(data, at, name)
    if kind == HEADER:
        return _find_header(data, at)
    found = _VALUE().match(data, at)
    if found is None:
        return None
    group = min(found.lastindex or 0, 6)
    start, end = found.span(group)
    value, following = found.group(group), found.group(7) or b""
    touches = not data[name_end - 1 : name_end].isspace() and not data[at : at + 1].isspace()
    certain = touches and (sign == b">" or (sign == b"=" and _CAPITALS().search(name) is not None))
    ends_line = group == 6 and following in _LINE_ENDS
    plain = (sign == b":" and ends_line) or (sign == b"=" and touches and _PARAMETER().search(name) is not None)
    apart = sign == b" " or (sign == b"=" and touches and (ends_line or following == b";"))
    way = _Way(group < 6, sign, certain, plain, apart)
    if not way.quoted:
        quoted_name = head[len(name) :].strip(b"*") != b""
        if quoted_name or (following in (b"(", b"[", b"{", b"<") and sign != b">"):
            return None  # code; and JSON would not be JSON any more
        if value.endswith((b".", b":")) and following.isspace():
            end, value = end - 1, value[:-1]
    value = value[:EXAMINED]
    if _is_code(value, way) or (kind == TOKEN and _names_request(name, value, way)):
        return None
    kind = _judge(kind, value, way)
    return (start, end, kind) if kind else None


def ends_with_name(data: bytes, name_end: int) -> bool:
    """Return whether what is before ``name_end`` ends with the name of a secret, whatever is before that."""
    name = data[max(0, name_end - NAME) : name_end].rstrip(b" \t?").rstrip(_CLOSING)
    for one in (name, _SUFFIX().sub(b"", name)):
        plain = one.translate(None, b" -_.").lower()
        if plain.endswith((b"pass", *_BY_END.get(plain[-3:], ()))) or one.endswith((b"_PAT", b"_KEY")):
            return True
    return False


def _find_kind(name: bytes) -> str:
    """Return the kind of secret that a name stands for; "" if none. ``DB_PASSWORD_PROD`` is one, ``page_token`` is not."""
    kind = _find_plain_kind(name)
    if not kind and (name[-1:].isupper() or name[-1:].isdigit()):
        kind = _find_plain_kind(_SUFFIX().sub(b"", name))
    return kind if kind and not _QUALIFIED().search(name) else ""


def _find_plain_kind(name: bytes) -> str:
    names = _BY_END.get(name[-3:].lower())
    if names is not None:
        plain = name.lower().translate(None, b" _-.")
        if plain.endswith(names):
            return "" if plain.endswith(_NO_SECRETS) else next(_KINDS[one] for one in names if plain.endswith(one))
    if name.endswith(_PASS) or name in (b"PASS", b"pass"):
        return PASSWORD
    if name.endswith(b"_PAT"):
        return TOKEN  # a personal access token
    return ANY_KEY if name.endswith(b"_KEY") else ""


def _names_request(name: bytes, value: bytes, way: _Way) -> bool:
    """Return whether a token more likely names a request than proves who sends it."""
    return not way.certain and _UUID().match(value) is not None and not _OWN_TOKEN().search(name)


def _is_code(value: bytes, way: _Way) -> bool:
    """Return whether a value is an expression: ``settings.password``."""
    return _DOTTED().match(value) is not None and not ((way.literal or way.apart) and _DIGIT().search(value))


def _judge(kind: str, value: bytes, way: _Way) -> str:
    """Return the kind of a value after a name of this kind, or "" if it is no secret."""
    if kind == KEY_DATA:
        return kind if len(value) >= 40 and _BASE64().match(value) else ""
    if kind == BASIC:
        return kind if _is_basic(value) else ""
    if kind == SIGNATURE:
        return kind if way.sign == b"=" and _is_signature(value) else ""
    if is_placeholder(value, way.literal):
        return ""
    if kind == PASSWORD:
        return kind if _is_password(value, way) else ""
    if kind == SECRET and len(value) >= 8 and _is_password(value, way) and (way.certain or not _is_wordy(value)):
        return kind
    # In an environment file, what is said to be a secret is one.
    told = kind != ANY_KEY and way.certain and len(value) >= 8 and _DIGIT().search(value) is not None
    if not told and not _is_random(value, way):
        return ""
    if kind in (API_KEY, ANY_KEY):
        kind = API_KEY
        if _AWS_SECRET().match(value):
            return "aws-secret-key"
        return "azure-key" if _AZURE_KEY().match(value) else kind
    return kind


def _is_signature(value: bytes) -> bool:
    """Return whether a value is the signature of a URL, and not a name in code."""
    named = _IDENTIFIER().match(value) is not None and _HEX().match(value) is None
    return _SIGNED().match(value) is not None and not named


def is_placeholder(value: bytes, literal: bool = True) -> bool:
    """Return whether a value stands for another one, or for none: a variable, a template, a mask, a path, a type.

    ``literal``: it is not code, where ``password2`` would be a name.
    """
    value = _ESCAPED_ENDS().sub(b"", value)
    bare = value.strip(b"!?.:_-#" if literal else b"0123456789!?.:_-#").lower()
    if (not bare and not value.isdigit()) or bare in _WORDS or value.lower() in _WORDS or len(set(value)) < 4:
        return True
    if (len(value) < 100 and _TEMPLATE().search(value)) or (len(value) < 40 and _SHORT_TEMPLATE().search(value)):
        return True
    if value.startswith(b"/") and (len(value) < 30 or _is_wordy(value)):
        return True
    return value.startswith(_NO_BEGINNINGS) or b"://" in value or value.lower().endswith(_NO_ENDS)


def _is_password(value: bytes, way: _Way) -> bool:
    """Return whether a value may be a password that a person or a program chose."""
    if len(value) < 6:
        return False
    if value.isdigit():
        return way.quoted or way.certain
    if not value.translate(None, b"_-.:?/").isalpha():
        return True
    if way.certain:
        return not (value.isupper() and b"_" in value)
    # Letters alone are a word, or a name in code.
    return way.literal and value.islower() and not _ABOUT().search(value)


def _is_wordy(value: bytes) -> bool:
    """Return whether a value is made of words and numbers: ``db-secret-2``, ``us-east-1``, ``refreshToken``."""
    if _UUID().match(value):
        return False
    parts = _PART().findall(value)
    return bool(_CAMEL().match(value)) or all(
        part.isalpha() or part.isdigit() or (len(_CHANGE().findall(part)) <= 1 and len(part) < 10) for part in parts
    )


def _is_random(value: bytes, way: _Way) -> bool:
    """Return whether a value looks as if a program had made it up."""
    if len(value) < 8 or not _DIGIT().search(value) or value.isdigit() or _is_wordy(value):
        return False
    if _UUID().match(value) or _HEX().match(value):
        return True
    if not way.literal and len(value) < 40 and _IDENTIFIER().match(value):
        # A name in code such as testRSA2048PrivateKey has longer words than chance would make.
        if len(value) >= 3.2 * len(_RUN().findall(value)):
            return False
    parts = _PART().findall(value)
    changes = sum(len(_CHANGE().findall(part)) for part in parts)
    if len(value) < 16:
        return changes >= (2 if way.certain else 4)
    return changes >= (1 if way.certain or (way.literal and max(map(len, parts)) >= 12) else 2)


def _is_basic(value: bytes) -> bool:
    """Return whether a value is what basic authentication sends: a name, a colon and a password, in base64."""
    if not _BASE64().match(value):
        return False
    try:
        text = base64.b64decode(value + b"=" * (-len(value) % 4), altchars=b"-_" if set(b"-_") & set(value) else None)
    except ValueError:
        return False
    return b":" in text[1:-1] and all(32 <= byte < 127 for byte in text)


def _find_cookies(data: bytes, at: int, name: bytes) -> Assigned | None:
    """Return the cookies of a header; of one that is being set, its value alone, without its attributes."""
    found = _COOKIES().match(data, at)
    if found is None:
        return None
    pairs = found.group(1).split(b";")
    values = [pair.partition(b"=")[2] for pair in pairs]
    is_set = name.lower().replace(b"-", b"").endswith(b"setcookie")
    values = values[:1] if is_set else values
    if not any(len(value) >= 8 and not is_placeholder(value) and not _is_wordy(value) for value in values):
        return None
    start, end = found.span(1)
    if is_set:
        start += len(pairs[0]) - len(values[0])
        end = start + len(values[0])
    return start, end, COOKIE


def _find_header(data: bytes, at: int) -> Assigned | None:
    """Return the secret of an ``Authorization`` header."""
    found = _SCHEME().match(data, at)
    if found is None:
        return None
    scheme, value = (found.group(1) or b"").lower(), found.group(2)
    start, end = found.span(2)
    if scheme == b"basic":
        return (start, end, BASIC) if _is_basic(value) else None
    certain = scheme in (b"bearer", b"token", b"bot", b"apikey", b"ssws")
    if is_placeholder(value) or not _is_random(value, _Way(True, b":", certain)):
        return None
    return start, end, "bearer-token" if scheme == b"bearer" else HEADER
