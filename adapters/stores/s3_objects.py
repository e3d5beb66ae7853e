"""The requests sent to S3, one method each, blocking, with every failure translated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.stores.s3_client import HeldBackBody, S3Connection, send_late
from adapters.stores.s3_errors import translate_code
from sidecar.errors import ObjectMissing, StoreMissing, StoreUnreachable
from sidecar.ports import Glance, ObjectInfo, StoredObject

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import MultipartUploadTypeDef, ObjectIdentifierTypeDef, ObjectTypeDef

CHUNK = 1 << 20
PAGE = 1000
"""What a request for a listing of names asks for; no server lists more."""
PART = 16 << 20
SINGLE_PUT_BELOW = 32 << 20
SINGLE_COPY_BELOW = 1 << 30
COPY_PART = 256 << 20
THREADS = 2
_DELETED_AT_ONCE = 1000


class S3Objects:
    """Objects under the configured prefix; keys are relative to it. Safe to use from several threads."""

    def __init__(self, connection: S3Connection) -> None:
        self._connection = connection
        self._config = connection.config
        self._bucket = connection.config.bucket
        self._encryption = connection.config.encryption

    @property
    def server(self) -> str:
        """The server's address, for people and to tell servers apart. Never contains credentials."""
        return self._connection.server

    def read(self, key: str) -> StoredObject | None:
        """Return a small object, whole, with its ETag as the version; ``None`` if there is none."""
        try:
            with self._translate_errors(key):
                answer = self._get_client().get_object(Bucket=self._bucket, Key=self._add_prefix(key))
                with answer["Body"] as body:
                    data = body.read()
                return StoredObject(data, _check_etag(answer["ETag"]))
        except ObjectMissing:
            return None

    def read_dated(self, key: str) -> tuple[bytes | None, float]:
        """Return a small object, and how many seconds ago it was written, by the server's clock; ``None`` if there is
        none."""
        try:
            with self._translate_errors(key):
                answer = self._get_client().get_object(Bucket=self._bucket, Key=self._add_prefix(key))
                with answer["Body"] as body:
                    data = body.read()
                asked = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
                return data, max(0.0, (asked - answer["LastModified"]).total_seconds())
        except ObjectMissing:
            return None, 0.0

    def write(self, key: str, data: bytes, **condition: str) -> str:
        """Write a small object, on a ``condition`` (``IfMatch`` or ``IfNoneMatch``) if one is given; return its ETag."""
        options: dict[str, Any] = {**self._encryption, **condition}
        with self._translate_errors(key):
            answer = self._get_client().put_object(Bucket=self._bucket, Key=self._add_prefix(key), Body=data, **options)
            return _check_etag(answer["ETag"])

    def write_late(self, key: str, body: HeldBackBody, **condition: str) -> str:
        """Write a small object with a body whose last byte is delayed."""
        options: dict[str, Any] = {**self._encryption, **condition}
        with self._translate_errors(key), send_late(body):
            answer = self._get_client().put_object(Bucket=self._bucket, Key=self._add_prefix(key), Body=body, **options)
            return _check_etag(answer["ETag"])

    def upload(self, key: str, path: Path) -> int:
        """Write an object from a file without loading it into memory; return its size."""
        size = path.stat().st_size
        if size >= SINGLE_PUT_BELOW:
            self._upload_in_parts(key, path, size)
            return size
        with path.open("rb") as file, self._translate_errors(key):
            self._get_client().put_object(Bucket=self._bucket, Key=self._add_prefix(key), Body=file, **self._encryption)
        return size

    def _upload_in_parts(self, key: str, path: Path, size: int) -> None:
        """Upload in parts and check the size that arrived. Raise ``StoreUnreachable`` if it differs."""
        from boto3.s3.transfer import TransferConfig

        parts = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=THREADS)
        with self._translate_errors(key):
            self._get_client().upload_file(
                str(path), self._bucket, self._add_prefix(key), ExtraArgs=dict(self._encryption), Config=parts
            )
            arrived = self._get_client().head_object(Bucket=self._bucket, Key=self._add_prefix(key))["ContentLength"]
        if arrived != size:
            self.remove([key])
            raise StoreUnreachable(f"{self.server} kept {arrived} of the {size} bytes of '{key}', now removed.")

    def open(self, key: str) -> StreamingBody:
        """Return an object's bytes, to read with ``read_chunk`` and to close. Raise ``ObjectMissing`` if there is none."""
        with self._translate_errors(key):
            body: StreamingBody = self._get_client().get_object(Bucket=self._bucket, Key=self._add_prefix(key))["Body"]
            return body

    def read_chunk(self, body: StreamingBody) -> bytes:
        """Return the next bytes, empty at the end. Raise ``StoreUnreachable`` if the body ends before its length."""
        with self._translate_errors(""):
            return body.read(CHUNK)

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the bucket. Raise ``ObjectMissing`` if there is none."""
        from boto3.s3.transfer import TransferConfig

        parts = TransferConfig(
            multipart_threshold=SINGLE_COPY_BELOW, multipart_chunksize=COPY_PART, max_concurrency=THREADS
        )
        with self._translate_errors(source):
            self._get_client().copy(
                {"Bucket": self._bucket, "Key": self._add_prefix(source)},
                self._bucket,
                self._add_prefix(target),
                ExtraArgs=dict(self._encryption),
                Config=parts,
            )

    def entries(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object under ``prefix``, in the server's order."""
        with self._translate_errors(prefix):
            pages = self._get_client().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._add_prefix(prefix)):
                if "IsTruncated" not in page and "Name" not in page:
                    raise self._make_not_s3_error()
                yield from map(self._describe, page.get("Contents", ()))

    def glance(self, prefix: str, after: str, level: bool) -> Glance:
        """Return what the first page of a listing shows."""
        options: dict[str, Any] = {"Delimiter": "/"} if level else {}
        start = self._add_prefix(prefix)
        if after:
            options["StartAfter"] = self._add_prefix(after)
        with self._translate_errors(prefix):
            page = self._get_client().list_objects_v2(Bucket=self._bucket, Prefix=start, **options)
            if "IsTruncated" not in page and "Name" not in page:
                raise self._make_not_s3_error()
            return Glance(
                [self._describe(entry) for entry in page.get("Contents", ())],
                sorted(entry["Prefix"][len(start) :].rstrip("/") for entry in page.get("CommonPrefixes", ())),
                complete=not page.get("IsTruncated", False),
            )

    def _describe(self, entry: ObjectTypeDef) -> ObjectInfo:
        key, modified = self._strip_prefix(entry["Key"]), entry["LastModified"].timestamp()
        return ObjectInfo(key, entry["Size"], modified, entry.get("ETag", ""))

    def folders(self, prefix: str, most: int, after: str = "", until: str = "") -> set[str]:
        """Return the next path part after ``prefix`` of keys that continue after a '/': about ``most`` at most, those
        that the server lists after ``after``, and not before ``until``.

        Servers sort 'a' and 'a-b' by these names, or as 'a-b/' and 'a/'. Only a name that is beyond ``until`` either way
        ends the listing, so what is listed until and after the same name is together what there is.
        """
        found: set[str] = set()
        start = self._add_prefix(prefix)
        options: dict[str, Any] = {"StartAfter": start + after} if after else {}
        with self._translate_errors(prefix):
            pages = self._get_client().get_paginator("list_objects_v2")
            options["PaginationConfig"] = {"PageSize": PAGE}
            for page in pages.paginate(Bucket=self._bucket, Prefix=start, Delimiter="/", **options):
                if "IsTruncated" not in page and "Name" not in page:
                    raise self._make_not_s3_error()
                names = [entry["Prefix"][len(start) :].rstrip("/") for entry in page.get("CommonPrefixes", ())]
                found.update(names)
                if len(found) >= most or (until and names and names[-1] > until):
                    break
        return found

    def versions(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield key and version id of every version and delete marker. Raise ``Unsupported`` if the server has no
        versions."""
        with self._translate_errors(prefix):
            pages = self._get_client().get_paginator("list_object_versions")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._add_prefix(prefix)):
                for entry in (*page.get("Versions", ()), *page.get("DeleteMarkers", ())):
                    yield self._strip_prefix(entry["Key"]), entry["VersionId"]

    def remove(self, keys: Iterable[str | tuple[str, str]]) -> int:
        """Remove objects, or single versions given as (key, version id); return how many were asked for."""
        wanted: list[ObjectIdentifierTypeDef] = [
            {"Key": self._add_prefix(key)}
            if isinstance(key, str)
            else {"Key": self._add_prefix(key[0]), "VersionId": key[1]}
            for key in keys
        ]
        for start in range(0, len(wanted), _DELETED_AT_ONCE):
            batch = wanted[start : start + _DELETED_AT_ONCE]
            with self._translate_errors(""):
                answer = self._get_client().delete_objects(
                    Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True}
                )
            for error in answer.get("Errors", ()):
                key, code = self._strip_prefix(error.get("Key", "")), error.get("Code", "")
                named = translate_code(code, 0, self._bucket, self.server, key, error.get("Message", ""))
                if not isinstance(named, ObjectMissing):
                    raise named
        return len(wanted)

    def unfinished(self, prefix: str) -> Iterator[MultipartUploadTypeDef]:
        """Yield every multipart upload under ``prefix`` that was neither completed nor aborted."""
        with self._translate_errors(prefix):
            pages = self._get_client().get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._add_prefix(prefix)):
                yield from page.get("Uploads", ())

    def abort(self, upload: MultipartUploadTypeDef) -> None:
        """Abort a multipart upload."""
        with self._translate_errors(upload["Key"]):
            self._get_client().abort_multipart_upload(
                Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )

    def _get_client(self) -> S3Client:
        return self._connection.client()

    def _make_not_s3_error(self) -> StoreMissing:
        return StoreMissing(
            f"What answers at {self.server} is no S3 server.", hint="Correct ?endpoint=… of the store URL."
        )

    def _translate_errors(self, key: str) -> AbstractContextManager[None]:
        return self._connection.named(key)

    def _add_prefix(self, key: str) -> str:
        return self._config.prefix + key

    def _strip_prefix(self, key: str) -> str:
        return key.removeprefix(self._config.prefix)


def _check_etag(etag: str) -> str:
    """Return the ETag of an answer without a body. It is the one part that nothing else protects from being cut, so
    raise ValueError if it is."""
    if not etag or (etag.startswith('"') and (len(etag) < 3 or not etag.endswith('"'))):
        raise ValueError("the ETag is cut")
    return etag
