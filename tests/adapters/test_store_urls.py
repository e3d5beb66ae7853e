"""What people may write after --store, and what they are told when it makes no sense."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import adapters
from adapters.stores.disk import DiskStore
from adapters.stores.s3 import S3Config, S3Store
from adapters.stores.urls import open_store
from sidecar.errors import BadReference

PROJECT = Path(adapters.__file__).parents[1]


def _config(url: str) -> S3Config:
    store = open_store(url)
    assert isinstance(store, S3Store)
    return store._objects._config


def _root(url: str) -> Path:
    store = open_store(url)
    assert isinstance(store, DiskStore)
    return store._root


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("file:/var/x", "/var/x"),
        ("file:///var/x", "/var/x"),
        ("file://localhost/var/x", "/var/x"),
        ("file:/with%20blank/x", "/with blank/x"),
        ("file:/with blank/%C3%BC", "/with blank/ü"),
        ("file:/a%23b%3Fc", "/a#b?c"),
        ("file:/100%/x", "/100%/x"),
        ("volume:/data", "/data"),
        ("volume:///data", "/data"),
        ("volume:/data?prefix=memories/a", "/data/memories/a"),
    ],
)
def test_paths(url: str, root: str) -> None:
    assert _root(url) == Path(root)
    assert open_store(url).url == url


def test_relative_paths_and_homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert _root("file:x/y") == tmp_path / "x/y"
    assert _root("file:./x") == tmp_path / "x"
    assert _root("file:~/x") == tmp_path / "home/x"


def test_a_volume_must_be_mounted_where_the_path_says() -> None:
    store = open_store("volume:/data?prefix=memories")
    assert isinstance(store, DiskStore)
    assert store._mount == Path("/data")


def test_buckets() -> None:
    assert _config("s3://bucket") == S3Config("bucket")
    assert _config("s3://bucket/") == S3Config("bucket")
    assert _config("s3://bucket/a%20b/c/") == S3Config("bucket", "a b/c/")


def test_every_option_of_a_bucket() -> None:
    url = (
        "s3://My_bucket.1/p?endpoint=http://127.0.0.1:8333&region=eu-west-1&path-style=false&sse=aws:kms"
        "&sse-kms-key-id=arn:aws:kms:eu-west-1:1:key/2&single-writer=true&profile=ops"
        "&sandbox-endpoint=https://s3.example.com:8443"
    )
    assert _config(url) == S3Config(
        bucket="My_bucket.1",
        prefix="p/",
        endpoint="http://127.0.0.1:8333",
        sandbox_endpoint="https://s3.example.com:8443",
        region="eu-west-1",
        path_style=False,
        sse="aws:kms",
        sse_kms_key_id="arn:aws:kms:eu-west-1:1:key/2",
        single_writer=True,
        profile="ops",
    )


def test_a_kms_key_means_kms() -> None:
    assert _config("s3://b?sse-kms-key-id=k").sse == "aws:kms"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("/var/x", "file:/var/x"),
        ("./x", "file:./x"),
        ("~/x", "file:~/x"),
        ("memories", "file:memories"),
        ("", "file:/path"),
        ("/odd:name", "file:/odd:name"),
        ("fiel:/x", "file:"),
        ("S3://bucket", "s3:"),
        ("gs://bucket", "no 'gs:' store"),
        ("file:", "names no folder"),
        ("file:/", "names no folder"),
        ("file://var/x", "file:/var/x"),
        ("file:/x?prefix=y", "no option 'prefix'"),
        ("file:/x#y", "%23"),
        ("file:/x\n", "control character"),
        ("file:/x%00y", "NUL"),
        ("file:/%FF", "UTF-8"),
        ("file:~no-such-user-here/x", "whole path"),
        ("volume:data", "volume:/data"),
        ("volume://data", "volume:/data"),
        ("volume:/data?prefix=../x", "no usable prefix"),
        ("volume:/data?prefix=a//b", "no usable prefix"),
        ("s3:", "s3://bucket"),
        ("s3:bucket/x", "s3://bucket"),
        ("s3:///x", "names no bucket"),
        ("s3://127.0.0.1:9000/bucket", "endpoint"),
        ("s3://bucket/a/../b", "no usable prefix"),
        ("s3://bucket?endpont=http://x", "endpoint?"),
        ("s3://bucket?single_writer=true", "single-writer?"),
        ("s3://bucket?pathstyle=true", "path-style?"),
        ("s3://bucket?wibble=1", "no option 'wibble'"),
        ("s3://bucket?region=a&region=b", "given twice"),
        ("s3://bucket?region=", "no value"),
        ("s3://bucket?endpoint=127.0.0.1:8333", "endpoint=https://"),
        ("s3://bucket?endpoint=http://", "endpoint=https://"),
        ("s3://bucket?endpoint=http://h:99999", "endpoint=https://"),
        ("s3://bucket?sandbox-endpoint=s3.example.com", "Write sandbox-endpoint=https://"),
        ("s3://bucket?sandbox-endpoint=http://h:99999", "'sandbox-endpoint' is no address"),
        ("s3://bucket?sandbox_endpoint=http://h", "sandbox-endpoint?"),
        ("file:/x?sandbox-endpoint=http://h", "no option 'sandbox-endpoint'"),
        ("s3://bucket?path-style=maybe", "path-style=true"),
        ("s3://bucket?sse=rot13", "sse=AES256"),
        ("s3://bucket?sse=AES256&sse-kms-key-id=k", "aws:kms"),
        ("s3://[bucket", "cannot be read"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line_with_what_to_write_instead(url: str, said: str) -> None:
    with pytest.raises(BadReference) as refused:
        open_store(url)
    assert said in f"{refused.value.message} {refused.value.hint}"
    assert "\n" not in refused.value.message + refused.value.hint
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA123:hunter2@bucket/x",
        "s3://hunter2@bucket",
        "s3://bucket?endpoint=http://me:hunter2@127.0.0.1:1",
        "s3://bucket?sandbox-endpoint=http://me:hunter2@127.0.0.1:1",
        "s3://bucket?secret-key=hunter2",
        "file://me:hunter2@host/x",
        "https://me:hunter2@host/bucket",
    ],
)
def test_a_secret_in_a_url_is_refused_and_never_repeated(url: str) -> None:
    with pytest.raises(BadReference) as refused:
        open_store(url)
    assert "hunter2" not in f"{refused.value.message} {refused.value.hint} {refused.value.__cause__}"


def test_opening_an_s3_store_does_not_import_boto3() -> None:
    script = (
        "import sys; from adapters.stores.urls import open_store; open_store('s3://b');"
        "print(any('boto' in name for name in sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True, timeout=30)
    assert told.stdout.strip() == b"False"
