"""Credentials that can be recognised by their form alone: one row per kind.

A token begins with a mark of its vendor, followed by many letters and digits. Most marks end in ``_``, ``-`` or ``.``,
which is what makes them quick to find: see ``credentials.py``.
"""

from __future__ import annotations

import re
from typing import Dict, List, Tuple

from sidecar.program.privacy.expressions import Expression

_N, _W, _H = "[A-Za-z0-9]", "[A-Za-z0-9_-]", "[0-9a-f]"
_END, _END_WORD = "(?![A-Za-z0-9])", "(?![A-Za-z0-9_-])"
_UUID = _H + "{8}-" + _H + "{4}-" + _H + "{4}-" + _H + "{4}-" + _H + "{12}"
# A name in code may be as long, but then it has only small letters.
_NO_NAME = "(?=[a-z_-]{0,32}[A-Z0-9])"
# Not after a hyphen: "key-" is a mark, the end of "cache-key-" is not.
_ALONE = "^"

# Name, beginnings, what follows.
_ROWS: Tuple[Tuple[str, str, str], ...] = (
    ("aws-access-key", "AKIA ASIA ABIA", "[A-Z0-9]{16}" + _END),
    ("github-token", "ghp_ gho_ ghu_ ghs_ ghr_", _N + "{36,255}"),
    ("github-fine-grained-token", "github_pat_", _N + "{22}_" + _N + "{40,100}"),
    ("gitlab-token", "glpat- glptt- glrt- gldt- glcbt- glft- glsoat- glagent- gloas- glimt- glffct-", _W + "{20,300}"),
    ("bitbucket-token", "ATBB", _N + "{32}" + _END),
    ("atlassian-token", "ATATT3 ATCTT3", "[A-Za-z0-9_=-]{100,300}"),
    ("anthropic-key", "sk-ant-", "[a-z]{2,12}[0-9]{2}-" + _W + "{32,160}"),
    ("openai-key", "sk-proj- sk-svcacct- sk-admin- sk-None-", _W + "{40,200}"),
    ("openai-key", "sk-", _N + "{32,64}" + _END),
    ("openrouter-key", "sk-or-", "v1-" + _H + "{64}"),
    ("langfuse-key", "sk-lf-", _UUID),
    ("google-api-key", "AIza", _W + "{35}" + _END_WORD),
    ("google-oauth-secret", "GOCSPX-", _W + "{28}"),
    ("google-access-token", "ya29.", _W + "{40,400}"),
    ("slack-token", "xoxa- xoxb- xoxc- xoxe- xoxp- xoxr- xoxs- xapp-", "[A-Za-z0-9-]{24,400}"),
    ("slack-token", "xoxd-", "[A-Za-z0-9%/+=-]{24,400}"),
    ("stripe-key", "sk_live_ rk_live_ sk_test_ rk_test_ sk_org_", _N + "{20,250}"),
    ("stripe-webhook-secret", "whsec_", "[A-Za-z0-9+/]{32,64}={0,2}"),
    ("square-token", "sq0atp- sq0csp-", _W + "{22,60}"),
    ("flutterwave-key", "FLWSECK-", _N + "{32}-X"),
    ("shippo-token", "shippo_live_ shippo_test_", _H + "{40}" + _END),
    ("duffel-token", "duffel_live_ duffel_test_", _W + "{40,60}"),
    ("plaid-token", "access-production- access-sandbox- access-development-", _UUID),
    ("shopify-token", "shpat_ shpss_ shpca_ shppa_", "[0-9a-fA-F]{32}" + _END),
    ("npm-token", "npm_", _N + "{36}" + _END),
    ("pypi-token", "pypi-", "AgE" + _W + "{50,400}"),
    ("rubygems-key", "rubygems_", _H + "{48}" + _END),
    ("clojars-token", "CLOJARS_", "[0-9a-z]{60}" + _END),
    ("docker-token", "dckr_pat_ dckr_oat_", _NO_NAME + _W + "{24,64}"),
    ("jfrog-key", "AKCp", _N + "{69}" + _END),
    ("huggingface-token", "hf_ api_org_", _N + "{34,40}" + _END),
    ("sendgrid-key", "SG.", _W + r"{22}\." + _W + "{43}"),
    ("mailgun-key", "key-", _ALONE + _H + "{32}" + _END_WORD),
    ("brevo-key", "xkeysib- xsmtpsib-", _H + "{64}-" + _N + "{16}" + _END),
    ("resend-key", "re_", _N + "{8}_" + _N + "{24}" + _END),
    ("age-secret-key", "AGE-SECRET-KEY-", "1[0-9A-Z]{58}"),
    ("e2b-key", "e2b_", _H + "{40}" + _END),
    ("daytona-key", "dtn_", _H + "{64}" + _END),
    ("modal-token", "ak- as-", _ALONE + _N + "{22}" + _END),
    ("runpod-key", "rpa_", "[A-Z0-9]{40,50}" + _END),
    ("databricks-token", "dapi", _H + "{32}(?:-[0-9])?" + _END),
    ("digitalocean-token", "dop_v1_ doo_v1_ dor_v1_", _H + "{64}" + _END),
    ("groq-key", "gsk_", _N + "{40,64}" + _END),
    ("xai-key", "xai-", _N + "{64,100}" + _END),
    ("cerebras-key", "csk-", "[a-z0-9]{40,60}" + _END),
    ("fireworks-key", "fw_", _N + "{22,26}" + _END),
    ("elevenlabs-key", "sk_", _H + "{48}" + _END),
    ("jina-key", "jina_", _N + "{32}" + _W + "{20,40}"),
    ("voyage-key", "pa-", _ALONE + _W + "{43}" + _END_WORD),
    ("replicate-token", "r8_", _N + "{37}" + _END),
    ("perplexity-key", "pplx-", _N + "{40,64}" + _END),
    ("nvidia-key", "nvapi-", _W + "{60,80}"),
    ("tavily-key", "tvly-", _W + "{32,64}"),
    ("pinecone-key", "pcsk_", _W + "{40,100}"),
    ("wandb-key", "wandb_v1_", _W + "{40,120}"),
    ("langsmith-key", "lsv2_pt_ lsv2_sk_", _H + "{32}_" + _H + "{10}" + _END),
    ("supabase-token", "sbp_", "(?:v[0-9]_|oauth_)?" + _H + "{40}" + _END),
    ("supabase-key", "sb_secret_", _NO_NAME + _W + "{22}_" + _W + "{8}" + _END_WORD),
    ("planetscale-token", "pscale_tkn_ pscale_pw_ pscale_oauth_", "[A-Za-z0-9_=-]{32,64}"),
    ("netlify-token", "nfp_", _N + "{36,40}" + _END),
    ("vercel-token", "vcp_ vci_ vca_ vcr_ vck_ vercel_blob_rw_", _NO_NAME + "[A-Za-z0-9_]{24,80}"),
    ("fly-token", "fo1_ fm1a_ fm1r_ fm2_", "[A-Za-z0-9_+/=-]{40,1000}"),
    ("heroku-key", "HRKU-", "(?:" + _UUID + "|" + _W + "{58,64})"),
    ("cloudflare-key", "v1.0-", _H + "{24}-" + _H + "{146}"),
    ("pulumi-token", "pul-", _H + "{40}" + _END),
    ("prefect-key", "pnu_ pnb_", "[a-z0-9]{36}" + _END),
    ("infracost-key", "ico-", _ALONE + _N + "{32}" + _END),
    ("linear-key", "lin_api_ lin_oauth_", _N + "{40,64}" + _END),
    ("notion-token", "ntn_", _N + "{40,60}" + _END),
    ("notion-token", "secret_", _N + "{43}" + _END),
    ("figma-token", "figd_", _W + "{40,64}"),
    ("grafana-token", "glsa_", _N + "{32}_[0-9a-fA-F]{8}" + _END),
    ("grafana-token", "glc_", "eyJ[A-Za-z0-9+/=]{40,400}"),
    ("sentry-token", "sntrys_ sntryu_ sntrya_ sntryi_", "[A-Za-z0-9+/=_-]{40,300}"),
    ("newrelic-key", "NRAK- NRIQ- NRII- NRJS- NRRA-", _W + "{19,64}"),
    ("honeycomb-key", "hcaik_ hcxik_ hcalk_ hcamk_", "[A-Za-z0-9_]{40,70}"),
    ("dynatrace-token", "dt0c01.", "[A-Z0-9]{24}[.][A-Z0-9]{64}"),
    ("posthog-key", "phx_", _N + "{40,60}" + _END),
    ("sonar-token", "squ_ sqp_ sqa_", _H + "{40}" + _END),
    ("sourcegraph-token", "sgp_", "(?:" + _H + "{16}_|local_)?" + _H + "{40}" + _END),
    ("circleci-token", "CCIPAT_ CCIPRJ_", _N + "{16,40}_" + _H + "{40}"),
    ("buildkite-token", "bkua_ bkct_", _H + "{40}" + _END),
    ("postman-key", "PMAK-", _H + "{24}-" + _H + "{34}"),
    ("contentful-token", "CFPAT-", _W + "{43}" + _END_WORD),
    ("readme-key", "rdme_", "[a-z0-9]{70}" + _END),
    ("typeform-token", "tfp_", _W + "{40,70}"),
    ("hubspot-token", "pat-na1- pat-eu1-", _UUID),
    ("launchdarkly-key", "sdk-", _ALONE + _UUID),
    ("dropbox-token", "sl. sl.u.", _W + "{100,1500}"),
    ("mapbox-token", "sk.", "eyJ" + _W + r"{40,400}\." + _W + "{20,60}"),
    ("tailscale-key", "tskey-auth- tskey-api- tskey-client- tskey-webhook- tskey-scim-", _N + "{8,24}-" + _N + "{16,48}"),
    ("vault-token", "hvs. hvb. hvr.", _NO_NAME + _W + "{24,300}"),
    ("doppler-token", "dp.pt. dp.st. dp.ct. dp.sa. dp.scim. dp.audit.", _N + "{40,44}" + _END),
    ("onepassword-token", "ops_", "eyJ[A-Za-z0-9_=-]{100,1500}"),
)  # fmt: skip

TOKENS: Dict[bytes, List[Tuple[str, Expression]]] = {}
"""By their beginnings: the name of each kind, and what follows."""
for _name, _beginnings, _rest in _ROWS:
    for _beginning in _beginnings.split():
        _whole = _rest.replace(_ALONE, "(?<!-" + re.escape(_beginning) + ")", 1) if _rest[0] == _ALONE else _rest
        TOKENS.setdefault(_beginning.encode(), []).append((_name, Expression(_whole.encode())))

ENDS = frozenset(beginning[-3:] for beginning in TOKENS)
"""The last three bytes of the beginnings. Most candidates have others."""
LENGTHS = tuple(sorted({len(beginning) for beginning in TOKENS}, reverse=True))
"""How long beginnings are, the longest first."""
