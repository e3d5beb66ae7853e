"""Six common tokenizers, with their vocabularies: installed once from npm, run by Node."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import NoReturn

import pytest

from tests.parts.homes import PROJECT

PACKAGES = (
    "gpt-tokenizer@4.0.0",
    "@anthropic-ai/tokenizer@0.0.4",
    "llama-tokenizer-js@1.2.2",
    "llama3-tokenizer-js@1.2.0",
    "mistral-tokenizer-js@1.0.0",
)
NAMES = ("cl100k", "o200k", "claude", "llama", "llama3", "mistral")
LARGE = ("cl100k", "o200k", "claude", "llama3")
"""Those with a vocabulary of 65,000 tokens or more, as models since 2023 have them."""
_CACHE = PROJECT / ".cache" / "tokenizers"
_WITHIN = 300.0
_PROGRAM = """
import fs from "fs";
import * as cl100k from "gpt-tokenizer/encoding/cl100k_base";
import * as o200k from "gpt-tokenizer/encoding/o200k_base";
import { countTokens } from "@anthropic-ai/tokenizer";
import one from "llama-tokenizer-js";
import three from "llama3-tokenizer-js";
import small from "mistral-tokenizer-js";
const plain = { disallowedSpecial: new Set() };
const [llama, llama3, mistral] = [one, three, small].map((each) => each.default ?? each);
const count = (text) => [
  cl100k.encode(text, plain).length, o200k.encode(text, plain).length, countTokens(text),
  llama.encode(text, false, false).length, llama3.encode(text, { bos: false, eos: false }).length,
  mistral.encode(text, false, false).length,
];
console.log(JSON.stringify(JSON.parse(fs.readFileSync(0, "utf8")).map(count)));
"""


def count_tokens(texts: Sequence[str]) -> list[dict[str, int]]:
    """How many tokens each text has, by tokenizer.

    Skip the test where Node or npm is missing or cannot install; fail it instead where the variable CI is set.
    """
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        _unavailable("Node and npm are not installed")
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = _CACHE / "done"
        if not done.exists() or done.read_text() != " ".join(PACKAGES):
            command = [npm, "install", "--no-save", "--no-audit", "--no-fund", "--loglevel=error", *PACKAGES]
            try:
                subprocess.run(command, cwd=_CACHE, check=True, capture_output=True, text=True, timeout=_WITHIN)
            except subprocess.CalledProcessError as error:
                _unavailable(f"`npm install` failed: {error.stderr[-400:]}")
            except subprocess.TimeoutExpired:
                _unavailable(f"`npm install` took more than {_WITHIN:.0f} s")
            (_CACHE / "count.mjs").write_text(_PROGRAM)
            done.write_text(" ".join(PACKAGES))
    ran = subprocess.run(
        [node, "count.mjs"], cwd=_CACHE, input=json.dumps(list(texts)), check=True, capture_output=True, text=True
    )
    return [dict(zip(NAMES, row, strict=True)) for row in json.loads(ran.stdout)]


def _unavailable(reason: str) -> NoReturn:
    message = f"no tokenizers to test with: {reason}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
