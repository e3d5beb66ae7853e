"""Secrets as they are found in the notes, settings and transcripts of agents, each in a piece of text of its own.

This list was written from what vendors document and from what people write, not from the expressions that the product
searches with: it says how much of that is found. ``PLANTED`` has a name and a text for each kind. What is between « and »
is the secret, and ``{A36}`` in it is 36 random letters. No secret stands here as a whole, and none was ever valid.
"""

from __future__ import annotations

import base64
import random
import re
import string

DIGITS, SMALL, LARGE = string.digits, string.ascii_lowercase, string.ascii_uppercase
LETTERS = {
    "A": DIGITS + SMALL + LARGE,
    "s": DIGITS + SMALL,
    "U": DIGITS + LARGE,
    "h": DIGITS + "abcdef",
    "H": DIGITS + "ABCDEF",
    "d": DIGITS,
    "w": DIGITS + SMALL + LARGE + "-_",
    "b": DIGITS + SMALL + LARGE + "+/",
}
PASSWORDS = (
    *(
        "Summer{}!",
        "P@ssw{}rd-",
        "k9#mQ2$vL7x{}",
        "monkey{}",
        "Zx81.spectrum{}",
        "blue-Tiger{}",
        "iloveyou{}",
        "n0t4u{}Kn0w%",
    ),
)
"""As people choose them. A number makes each of them another one, also in the part that an index has."""

# Those that people lose most often.
NAMED = {
    # Names that end in PASSWORD, API_KEY and the like.
    "dotenv-db-password": "APP_ENV=production\nDB_USERNAME=app\nDB_PASSWORD=«{P}»\n",
    "dotenv-redis-password": 'REDIS_PASSWORD="«{P}»"\nREDIS_PORT=6379',
    "shell-pgpassword": "PGPASSWORD=«{P}» psql -h db.internal -U app -c 'select 1'",
    "shell-export-mysql-pwd": "export MYSQL_PWD='«{P}»'",
    "powershell-password": '$env:ADMIN_PASSWORD = "«{P}»"',
    "dockerfile-env": "FROM node:22\nENV SMTP_PASSWORD=«{P}»\nRUN npm ci",
    "docker-run-env": "docker run -d -e MYSQL_ROOT_PASSWORD=«{P}» -p 3306:3306 mysql:8",
    "compose-environment": "services:\n  db:\n    environment:\n      POSTGRES_PASSWORD: «{P}»\n",
    "dotenv-api-key": "WEATHER_API_KEY=«{A32}»",
    "dotenv-quoted-api-key": "MAPS_API_KEY='«{s40}»'",
    "github-actions-env": "      env:\n        LINTER_API_KEY: «{h40}»\n",
    "dotenv-secret": "JWT_SECRET=«{A44}»",
    "dotenv-token": "CI_DEPLOY_TOKEN=«{A30}»",
    "systemd-environment": 'Environment="GRAFANA_ADMIN_PASSWORD=«{P}»"',
    "ci-log-password": "2026-05-03T10:22:01Z + docker login -u ci --password «{P}» registry.example.com",
    # JSON, YAML, TOML, INI, properties, XML.
    "json-password": '{"host": "db", "username": "app", "password": "«{P}»"}',
    "json-compact-password": '{"user":"root","passwd":"«{P}»"}',
    "json-nested-db-password": '{"db": {"dbPassword": "«{P}»", "pool": 5}}',
    "json-access-token": '{"access_token": "«{w64}»", "token_type": "bearer", "expires_in": 3600}',
    "json-escaped-in-transcript": '{"output": "{\\n  \\"client_secret\\": \\"«{A40}»\\"\\n}"}',
    "yaml-password": "smtp:\n  host: mail\n  password: «{P}»\n",
    "yaml-double-quoted": 'admin:\n  password: "«{P}»"\n',
    "helm-values": "auth:\n  rootPassword: «{P}»\n  replicaCount: 2\n",
    "ansible-become": "ansible_become_pass: «{P}»",
    "spring-properties": "spring.datasource.password=«{P}»",
    "toml-secret": '[oauth]\nclient_secret = "«{w36}»"',
    "ini-my-cnf": "[client]\nuser=backup\npassword=«{P}»\n",
    "php-wp-config": "define( 'DB_PASSWORD', '«{P}»' );",
    "maven-settings": "<server><id>nexus</id><username>ci</username><password>«{P}»</password></server>",
    "dotnet-connection-string": "Server=tcp:x.database.windows.net;Database=d;User ID=sa;Password=«{P0}»;Encrypt=True;",
    "python-keyword": 'conn = psycopg.connect(host="db", user="app", password="«{P}»")',
    "javascript-object": "const pool = new Pool({ user: 'app', password: '«{P}»', port: 5432 })",
    "terraform-variable": 'variable "db_password" {\n  default = "«{P}»"\n}',
    "note-in-markdown": "- Login: admin\n- Password: «{P}»\n",
    "sshpass": "sshpass -p «{P0}» ssh root@10.0.0.7",
    # Headers, cookies and URLs.
    "basic-auth-header": "Authorization: Basic «{basic}»",
    "basic-auth-curl": "curl -u admin:«{P0}» https://api.example.com/v1/users",
    "bearer-header": "curl -H 'Authorization: Bearer «{w48}»' https://api.example.com/me",
    "bearer-in-python": 'headers = {"Authorization": f"Bearer «{A40}»"}',
    "x-api-key-header": 'curl -H "x-api-key: «{A40}»" https://api.example.com',
    "x-auth-token-header": "X-Auth-Token: «{h32}»",
    "cookie-header": "Cookie: lang=en; sessionid=«{s32}»; csrftoken={A16}",
    "set-cookie-header": "Set-Cookie: connect.sid=s%3A«{w32}».{A20}; Path=/; HttpOnly; Secure",
    "postgres-url": "postgresql://app:«{P0}»@db.internal:5432/app",
    "amqp-url": "amqps://worker:«{A24}»@mq.example.com/vhost",
    "git-remote-token": "https://oauth2:«{A26}»@git.example.com/team/repo.git",
    "url-query-key": "GET https://api.example.com/v2/search?q=cats&api_key=«{h32}»",
    "presigned-s3": "https://b.s3.amazonaws.com/k?X-Amz-Expires=900&X-Amz-Signature=«{h64}»",
    # Clouds and clusters.
    "aws-access-key-id": "aws_access_key_id = «AKIA{U16}»",
    "aws-secret-access-key": "aws_secret_access_key = «{b40}»",
    "aws-session-token": "aws_session_token = «IQoJb3JpZ2luX2VjE{b400}=»",
    "aws-session-token-env": "export AWS_SESSION_TOKEN=«FwoGZXIvYXdzE{b320}==»",
    "aws-sts-json": '{"Credentials": {"SecretAccessKey": "«{b40}»", "Expiration": "2026-05-03T10:22:01Z"}}',
    "azure-sas": "https://acct.blob.core.windows.net/c?sv=2023-11-03&ss=b&srt=co&sp=rl&se=2027-01-01&sig=«{b43}%3D»",
    "azure-storage-key": "DefaultEndpointsProtocol=https;AccountName=acct;AccountKey=«{b86}==»;EndpointSuffix=core.windows.net",
    "azure-client-secret": 'ARM_CLIENT_SECRET="«{A3}8Q~{w34}»"',
    "gcp-service-account-key": '{"private_key_id": "{h40}", "private_key": "«{pem-json}»"}',
    "gcp-api-key": "https://maps.googleapis.com/maps/api/js?key=«AIza{w35}»",
    "kubeconfig-token": "users:\n- name: admin\n  user:\n    token: «eyJ{w60}.eyJ{w200}.{w86}»\n",
    "kubeconfig-opaque-token": "users:\n- name: ci\n  user:\n    token: «{s64}»\n",
    "kubeconfig-key-data": "    client-key-data: «{pem-base64}»\n",
    "docker-config-auth": '{"auths": {"ghcr.io": {"auth": "«{basic}»"}}}',
    "npmrc-auth-token": "//npm.pkg.example.com/:_authToken=«{A40}»",
    "npmrc-auth": "_auth=«{basic}»\nalways-auth=true",
    "terraform-cloud-token": 'credentials "app.terraform.io" {\n  token = "«{A14}.atlasv1.{A67}»"\n}',
    "vault-token": "vault login «hvs.CAES{w90}»",
    # Vendors.
    "github-classic": "gh auth login --with-token <<< «ghp_{A36}»",
    "github-fine-grained": "git clone https://x-access-token:«github_pat_{A22}_{A59}»@github.com/a/b",
    "gitlab-personal": "PRIVATE-TOKEN: «glpat-{w20}»",
    "slack-bot": "The bot runs with «xoxb-{d12}-{d13}-{A24}» since Monday.",
    "slack-webhook": "curl -d @m.json https://hooks.slack.com/services/«T{U8}/B{U10}/{A24}»",
    "discord-bot": "client.login('«MT{A24}.G{A5}.{w38}»')",
    "discord-webhook": "https://discord.com/api/webhooks/{d18}/«{w68}»",
    "sentry-dsn-with-secret": "https://«{h32}»@o123456.ingest.us.sentry.io/4507",
    "sentry-user-token": "SENTRY_AUTH_TOKEN=«sntryu_{h64}»",
    "newrelic-user-key": "Api-Key: «NRAK-{U27}»",
    "newrelic-ingest": "license_key: «{h36}NRAL»",
    "pinecone": 'pc = Pinecone(api_key="«pcsk_{A5}_{A63}»")',
    "openai-project": "OPENAI_API_KEY=«sk-proj-{w74}T3BlbkFJ{w74}»",
    "anthropic": 'client = Anthropic(api_key="«sk-ant-api03-{w93}AA»")',
    "stripe-live": "stripe listen --api-key «sk_live_51{A97}»",
    "ssh-private-key": "«{pem}»\n",
}  # fmt: skip

# Thirty more, of vendors and programs that fewer people use.
CHOSEN = {
    "onepassword-secret-key": "Secret Key: «A3-{U6}-{U6}-{U5}-{U5}-{U5}-{U5}»",
    "adobe-client-secret": "ADOBE_CLIENT_SECRET=«p8e-{A32}»",
    "alibaba-secret": "ALIBABA_CLOUD_ACCESS_KEY_SECRET=«{A30}»",
    "algolia-admin-key": "algolia_admin_key: «{h32}»",
    "asana-token": "asana = Client.access_token('«1/{d16}:{h32}»')",
    "atlassian-token": "JIRA_TOKEN=«ATATT3xFfGF0{w180}»",
    "azure-devops-pat": "AZURE_DEVOPS_EXT_PAT=«{s52}»",
    "cloudflare-global-key": 'X-Auth-Key: «{h37}»',
    "datadog-app-key": 'dd_app_key: "«{h40}»"',
    "digitalocean": "doctl auth init -t «dop_v1_{h64}»",
    "easypost-key": "EasyPost test key «EZTK{A54}» works",
    "facebook-page-token": "page token: «EAACEdEose0cBA{A120}»",
    "fastly-token": "Fastly-Key: «{w32}»",
    "grafana-service-account": "Bearer «glsa_{A32}_{h8}»",
    "hashicorp-consul": "CONSUL_HTTP_TOKEN=«{uuid}»",
    "heroku-oauth": "machine api.heroku.com login me@example.com password «HRKU-{w60}»",
    "huggingface": "huggingface-cli login --token «hf_{A34}»",
    "jenkins-crumb-user": "curl -X POST --user ci:«11{h32}» https://jenkins.example.com/job/x/build",
    "linear-api-key": "linear: «lin_api_{A40}»",
    "mailchimp-key": "MAILCHIMP_KEY=«{h32}-us12»",
    "mongodb-atlas-url": "mongodb+srv://admin:«{P0}»@cluster0.ab1cd.mongodb.net/?retryWrites=true",
    "netrc-line": "machine git.example.com login ci password «{P}»",
    "okta-ssws": "Authorization: SSWS «00{w40}»",
    "planetscale-password": "PlanetScale: «pscale_pw_{w43}»",
    "rails-master-key": "RAILS_MASTER_KEY=«{h32}»",
    "sendgrid": "apikey / «SG.{w22}.{w43}»",
    "snowflake-password": 'snowflake.connector.connect(account="x", user="U", password="«{P}»")',
    "telegram-bot": "https://api.telegram.org/bot{d10}:«AA{w33}»/sendMessage",
    "twilio-auth-token": "client = Client('AC{h32}', auth_token='«{h32}»')",
    "vnc-password-in-a-sentence": "The password for the staging VNC is «{P}», ask before you change it.",
}  # fmt: skip

PLANTED = {**NAMED, **CHOSEN}

LEFT = frozenset(["terraform-variable", "php-wp-config", "asana-token", "netrc-line", "vnc-password-in-a-sentence"])
"""Those that are not looked for: ``docs/privacy.md`` says so."""


def plant(name: str, chance: random.Random) -> tuple[str, str]:
    """Return the text of a kind with a secret in it, and the secret."""
    text = re.sub(r"\{([A-Za-z0-9-]+)\}", lambda found: _make(found[1], chance), PLANTED[name])
    before, _, rest = text.partition("«")
    secret, _, after = rest.partition("»")
    return before + secret + after, secret


def _make(mask: str, chance: random.Random) -> str:
    if mask in ("P", "P0"):
        # Without quotes, a shell and a URL do not take all of them.
        chosen = [one for one in PASSWORDS if mask == "P" or not re.search(r"[!@#$%]", one)]
        return chance.choice(chosen).format(chance.randrange(1000, 9999))
    if mask == "basic":
        return base64.b64encode(f"ci-user:{_make('P', chance)}".encode()).decode()
    if mask == "uuid":
        return "-".join(_make(part, chance) for part in ("h8", "h4", "h4", "h4", "h12"))
    if mask.startswith("pem"):
        lines = [_make("b70", chance) for _ in range(7)]
        whole = "\n".join(["-----BEGIN OPENSSH PRIVATE KEY-----", *lines, "-----END OPENSSH PRIVATE KEY-----", ""])
        if mask == "pem-base64":
            return base64.b64encode(whole.encode()).decode()
        return whole.replace("\n", "\\n") if mask == "pem-json" else whole.rstrip("\n")
    found = re.fullmatch(r"([AsUhHdwb])([0-9]+)", mask)
    if found is None:
        return "{" + mask + "}"  # of the text itself
    return "".join(chance.choices(LETTERS[found[1]], k=int(found[2])))
