"""Secrets of every kind, made up: how each is written where people and programs write it.

``KINDS`` has one row per kind: a text with ``{}`` in it, and what makes the secret that goes there. No secret stands here
as a whole, and none was ever valid.
"""

from __future__ import annotations

import base64
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

ALL = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
URL_SAFE = ALL + "-_"
BASE64 = ALL + "+/"
SMALL = string.ascii_lowercase + string.digits
LARGE = string.ascii_uppercase + string.digits

Make = Callable[[random.Random], str]


@dataclass(frozen=True)
class Planting:
    """One kind: the text around it, and the secret."""

    name: str
    around: str
    make: Make

    def plant(self, chance: random.Random) -> tuple[str, str]:
        """Return a text with a secret in it, and the secret."""
        secret = self.make(chance)
        return self.around.replace("{}", secret), secret


def some(letters: str, count: int, *, before: str = "", after: str = "") -> Make:
    """So many random letters, with at least one digit among the first, as real ones nearly always have."""

    def make(chance: random.Random) -> str:
        text = "".join(chance.choices(letters, k=count))
        digits = [letter for letter in letters if letter.isdigit()] or [letters[0]]
        return before + text[:3] + chance.choice(digits) + text[4:] + after

    return make


def uuid(chance: random.Random) -> str:
    digits = "".join(chance.choices(HEX, k=32))
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def chosen(*passwords: str) -> Make:
    """A password as people choose them; a number at its end makes it another one each time."""
    return lambda chance: f"{chance.choice(passwords)}{chance.randrange(100, 999)}"


PASSWORD = chosen("Tr0ub4dor&", "hunter", "c0rrect-h0rse-", "qW!zp", "Wint3r#Sun", "maple.Leaf_", "zqjxkvw")
PLAIN_PASSWORD = chosen("hunter", "Tr0ub4dor", "c0rrect-h0rse-", "winterSun", "zqjxkvw")


def encoded(make: Make) -> Make:
    return lambda chance: base64.b64encode(make(chance).encode()).decode()


def joined(*parts: str | Make, by: str = "") -> Make:
    return lambda chance: by.join(part if isinstance(part, str) else part(chance) for part in parts)


def pem(kind: str, lines: int, line_end: str = "\n") -> Make:
    def make(chance: random.Random) -> str:
        body = ["".join(chance.choices(BASE64, k=64)) for _ in range(lines)]
        dashes = "-" * 5
        return line_end.join((f"{dashes}BEGIN {kind}{dashes}", *body, f"{dashes}END {kind}{dashes}"))

    return make


def encoded_pem(chance: random.Random) -> str:
    return base64.b64encode(pem("RSA PRIVATE KEY", 20)(chance).encode()).decode()


KINDS = tuple(
    Planting(name, around, make)
    for name, around, make in (
        # Assignments.
        ("env-password", "DB_PASSWORD={}\nDB_HOST=db\n", PASSWORD),
        ("env-exported-password", 'export POSTGRES_PASSWORD="{}"', PASSWORD),
        ("env-pass", "SMTP_PASS={}", PASSWORD),
        ("env-api-key", "ACME_API_KEY={}", some(ALL, 32)),
        ("env-secret", "SESSION_SECRET={}", some(ALL, 40)),
        ("env-token", "DEPLOY_TOKEN='{}'", some(SMALL, 40)),
        ("env-password-in-json-string", '{"command": "export DB_PASSWORD={}\\nmake deploy"}', PLAIN_PASSWORD),
        ("compose-password", "      MYSQL_ROOT_PASSWORD: {}\n", PASSWORD),
        ("compose-list-password", "    - REDIS_PASSWORD={}\n", PASSWORD),
        ("yaml-password", "database:\n  user: app\n  password: {}\n", PASSWORD),
        ("yaml-quoted-password", "  password: '{}'", PASSWORD),
        ("json-password", '{"user": "app", "password": "{}", "port": 5432}', PASSWORD),
        ("json-api-key", '{"apiKey": "{}"}', some(ALL, 32)),
        ("json-client-secret", '{"client_id": "a", "client_secret": "{}"}', some(URL_SAFE, 28)),
        ("json-refresh-token", '{"refresh_token": "{}"}', some(URL_SAFE, 60)),
        ("json-in-json-password", '{"body": "{\\"password\\": \\"{}\\"}"}', PLAIN_PASSWORD),
        ("toml-password", 'password = "{}"', PASSWORD),
        ("ini-password", "[client]\nuser = root\npassword = {}\n", PLAIN_PASSWORD),
        ("python-api-key", 'client = Client(api_key="{}")', some(ALL, 36)),
        ("python-dictionary-password", "CONFIG['password'] = '{}'", PASSWORD),
        ("javascript-secret", "const config = { clientSecret: '{}' };", some(ALL, 32)),
        ("go-token", 'Token: "{}",', some(HEX, 40)),
        ("xml-password", "<server><password>{}</password></server>", PLAIN_PASSWORD),
        ("django-secret-key", "SECRET_KEY = '{}'", some(SMALL + "!@#%^&*(-_=+)", 50, before="django-insecure-")),
        ("rails-secret-key-base", "secret_key_base: {}", some(HEX, 128)),
        ("laravel-key", "APP_KEY={}", some(BASE64, 43, before="base64:", after="=")),
        ("jdbc-password", "jdbc:postgresql://db/app?user=app&password={}&ssl=true", PLAIN_PASSWORD),
        ("ado-password", "Server=db;User Id=sa;Password={};Encrypt=true", PLAIN_PASSWORD),
        ("option-password", "mysqldump --user app --password {} app", PLAIN_PASSWORD),
        ("option-token", "deployctl --token={} up", some(ALL, 32)),
        ("markdown-password", "- **Password**: `{}`", PASSWORD),
        ("note-password", "Password: {}", PASSWORD),
        # Headers, cookies, URLs.
        ("basic-auth", "Authorization: Basic {}", encoded(joined("app:", PASSWORD))),
        ("curl-user", "curl -s -u app:{} https://example.com/x", PLAIN_PASSWORD),
        ("bearer", 'curl -H "Authorization: Bearer {}"', some(URL_SAFE, 43)),
        ("api-key-header", "X-API-Key: {}", some(ALL, 32)),
        ("token-header", "Authorization: token {}", some(HEX, 40)),
        ("set-cookie", "Set-Cookie: session={}; Path=/; HttpOnly", some(URL_SAFE, 40)),
        ("cookie", "Cookie: theme=dark; sid={}", some(HEX, 32)),
        ("postgres-url", "DATABASE_URL=postgres://app:{}@db.example.com:5432/app", PLAIN_PASSWORD),
        ("mongodb-url", "mongodb+srv://app:{}@cluster0.example.net/app", PLAIN_PASSWORD),
        ("redis-url", "redis://:{}@cache:6379/0", PLAIN_PASSWORD),
        ("https-url-token", "git clone https://{}@git.example.com/a/b.git", some(ALL, 40)),
        ("query-token", "https://example.com/hook?access_token={}&x=1", some(ALL, 32)),
        # Clouds.
        ("aws-access-key", "aws_access_key_id = {}", some(LARGE, 16, before="AK" + "IA")),
        ("aws-secret-key", "aws_secret_access_key = {}", some(BASE64, 40)),
        ("aws-secret-key-json", '{"SecretAccessKey": "{}"}', some(BASE64, 40)),
        ("aws-session-token", "export AWS_SESSION_TOKEN={}", some(BASE64, 300, before="FwoG" + "ZXIvYXdz", after="==")),
        ("aws-session-token-alone", "{}", some(BASE64, 300, before="IQoJ" + "b3JpZ2luX2Vj".replace("X2Vj", ""), after="=")),
        ("azure-storage-key", "DefaultEndpointsProtocol=https;AccountName=x;AccountKey={};", some(BASE64, 86, after="==")),
        ("azure-sas", "https://x.blob.core.windows.net/c/b?sv=2024-11-04&sr=b&sig={}&se=2026", some(ALL, 43, after="%3D")),
        ("azure-client-secret", "AZURE_CLIENT_SECRET={}", joined(some(ALL, 3), "8Q~", some(URL_SAFE, 34))),
        ("azure-service-bus", "Endpoint=sb://x/;SharedAccessKeyName=Root;SharedAccessKey={}", some(BASE64, 43, after="=")),
        ("gcp-service-account", '{"type": "service_account", "private_key": "{}"}', pem("PRIVATE KEY", 24, "\\n")),
        ("google-api-key", "key={}", some(URL_SAFE, 35, before="AI" + "za")),
        ("google-oauth-secret", "{}", some(URL_SAFE, 28, before="GOC" + "SPX-")),
        ("google-access-token", "{}", some(URL_SAFE, 120, before="ya" + "29.")),
        ("cloudflare-token", "CLOUDFLARE_API_TOKEN={}", some(URL_SAFE, 40)),
        ("digitalocean-token", "{}", some(HEX, 64, before="dop" + "_v1_")),
        ("heroku-key", "HEROKU_API_KEY={}", uuid),
        ("netlify-token", "{}", some(ALL, 36, before="nf" + "p_")),
        ("vercel-token", "VERCEL_TOKEN={}", some(ALL, 24)),
        ("fly-token", "FLY_API_TOKEN=FlyV1 {}", joined(some(ALL, 40, before="fm" + "2_"), some(BASE64, 300))),
        ("supabase-service-key", "{}", some(HEX, 40, before="sb" + "p_")),
        ("terraform-token", 'token = "{}"', joined(some(ALL, 14), ".atlas" + "v1.", some(URL_SAFE, 67))),
        ("vault-token", "VAULT_TOKEN={}", some(URL_SAFE, 92, before="hv" + "s.")),
        ("kubeconfig-token", "- name: admin\n  user:\n    token: {}\n", some(SMALL, 48)),
        ("kubeconfig-key-data", "    client-key-data: {}\n", encoded_pem),
        ("docker-config", '{"auths": {"registry.example.com": {"auth": "{}"}}}', encoded(joined("app:", PASSWORD))),
        # Registries and code.
        ("npm-auth-token", "//registry.example.com/:_authToken={}", uuid),
        ("npm-token", "//registry.npmjs.org/:_authToken={}", some(ALL, 36, before="np" + "m_")),
        ("pypi-token", "password = {}", some(URL_SAFE, 160, before="py" + "pi-AgEIcHlwaS5vcmc")),
        ("github-token", "{}", some(ALL, 36, before="gh" + "p_")),
        ("github-fine-grained-token", "{}", joined(some(ALL, 22, before="github" + "_pat_"), "_", some(ALL, 59))),
        ("gitlab-token", "{}", some(URL_SAFE, 20, before="gl" + "pat-")),
        ("bitbucket-token", "{}", some(ALL, 32, before="AT" + "BB")),
        # Services.
        ("slack-token", "{}", joined("xo" + "xb-", some("0123456789", 12), "-", some(ALL, 24))),
        ("discord-token", "{}", joined(some(ALL, 23, before="M"), ".", some(URL_SAFE, 6), ".", some(URL_SAFE, 38))),
        ("sentry-dsn", "SENTRY_DSN=https://{}@o450.ingest.sentry.io/45", some(HEX, 32)),
        ("sentry-token", "{}", joined(some(ALL, 40, before="sntr" + "ys_"), some(BASE64, 100))),
        ("newrelic-license", "NEW_RELIC_LICENSE_KEY={}", some(HEX, 36, after="NR" + "AL")),
        ("newrelic-key", "{}", some(LARGE, 27, before="NR" + "AK-")),
        # The first 82 end here.
        ("pinecone-key", "{}", some(ALL, 64, before="pc" + "sk_")),
        ("pinecone-old-key", "PINECONE_API_KEY={}", uuid),
        ("datadog-key", "DD_API_KEY={}", some(HEX, 32)),
        ("twilio-auth-token", "TWILIO_AUTH_TOKEN={}", some(HEX, 32)),
        ("twilio-key", "{}", some(HEX, 32, before="S" + "K")),
        ("sendgrid-key", "{}", joined(some(URL_SAFE, 22, before="S" + "G."), ".", some(URL_SAFE, 43))),
        ("mailgun-key", "{}", some(HEX, 32, before="ke" + "y-")),
        ("stripe-key", "{}", some(ALL, 24, before="sk" + "_live_")),
        ("stripe-webhook-secret", "{}", some(ALL, 32, before="wh" + "sec_")),
        ("square-token", "{}", some(URL_SAFE, 22, before="sq0" + "atp-")),
        ("shopify-token", "{}", some(HEX, 32, before="shp" + "at_")),
        ("openai-key", "OPENAI_API_KEY={}", some(URL_SAFE, 140, before="sk-" + "proj-")),
        ("anthropic-key", "{}", some(URL_SAFE, 95, before="sk-" + "ant-api03-")),
        ("huggingface-token", "{}", some(ALL, 34, before="h" + "f_")),
        ("replicate-token", "{}", some(ALL, 37, before="r" + "8_")),
        ("cohere-key", "COHERE_API_KEY={}", some(ALL, 40)),
        ("groq-key", "{}", some(ALL, 52, before="gs" + "k_")),
        ("databricks-token", "{}", some(HEX, 32, before="da" + "pi")),
        ("slack-webhook", "https://hooks.slack.com/services/T00000000/{}", joined("B", some(LARGE, 8), "/", some(ALL, 24))),
        ("telegram-token", "bot 1234567890{}", joined(":A" + "A", some(URL_SAFE, 33))),
        ("firebase-server-key", "AAAA1234567:{}", some(URL_SAFE, 134, before="APA" + "91b")),
        ("airtable-token", "{}", joined("pa" + "t", some(ALL, 14), ".", some(HEX, 64))),
        ("jwt", "{}", joined("ey" + "J", some(URL_SAFE, 33), ".ey" + "J", some(URL_SAFE, 120), ".", some(URL_SAFE, 43))),
        ("rsa-key", "{}\n", pem("RSA PRIVATE KEY", 24)),
        ("openssh-key", "{}\n", pem("OPENSSH PRIVATE KEY", 8)),
        ("pgp-key", "{}\n", pem("PGP PRIVATE KEY BLOCK", 24)),
        ("age-key", "{}", some(LARGE, 58, before="AGE-SECRET" + "-KEY-1")),
        ("wireguard-key", "[Interface]\nPrivateKey = {}\n", some(BASE64, 43, after="=")),
        # Not looked for: see docs/privacy.md.
        ("prose-password", "The password of the router is {} since May.", chosen("hunter")),
        ("glued-option", "mysql -uapp -p{} app", chosen("hunter")),
    )
)  # fmt: skip

NOT_LOOKED_FOR = frozenset(["prose-password", "glued-option"])
