"""Translate what S3 servers and botocore report into errors of the sidecar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sidecar.errors import (
    EncryptionRefused,
    KeyRefused,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreMissing,
    StoreUnreachable,
    SwapLost,
)

if TYPE_CHECKING:
    from botocore.exceptions import ClientError


class WriteConflict(SwapLost):
    """Two conditional writes met at the server and it accepted neither: the same request may be sent again."""


class Unsupported(StoreError):
    """The server does not support this operation."""


_OBJECT_MISSING = {"NoSuchKey", "NoSuchUpload", "NoSuchVersion"}
_BUCKET_MISSING = {"NoSuchBucket", "InvalidBucketName"}
_WRONG_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_NOT_ACCEPTED = {
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
    *("InvalidSecurity", "NotSignedUp"),
}
"""The credentials are not valid: the same for every object."""
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "UnauthorizedAccess"}
_KEY_REFUSED = {"InvalidKey", "KeyTooLongError", "InvalidURI", "InvalidObjectName", "XMinioInvalidObjectName"}
_NO_ENCRYPTION = {"InvalidEncryptionAlgorithmError", "ServerSideEncryptionConfigurationNotFoundError"}
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "StorageFull"}
_PASSING = {
    *("SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "InternalError", "ServiceUnavailable"),
    *("RequestTimeout", "OperationAborted", "BadDigest", "IncompleteBody"),
    *("XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"),
}

_WHO = "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile: they must be allowed to read, write, list, delete."


@contextmanager
def translate_s3_errors(
    bucket: str, address: Callable[[], str], key: str = "", *, encryption: str | None = None
) -> Iterator[None]:
    """Inside this block what botocore and its dependencies raise becomes the ``StoreError`` that says what to do.

    ``encryption`` is what the server is asked to encrypt with, if anything.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (ResponseParserError, KeyError, ValueError) as error:
        # Headers that end half way, or a page from something that is not an S3 server: botocore's parsers fail on them.
        raise StoreUnreachable(
            f"{address()} sent an answer that cannot be read.", hint="Try again; if it stays so, check ?endpoint=…"
        ) from error
    except (BotoCoreError, ClientError, Boto3Error, HTTPError, ConnectionError, TimeoutError) as error:
        server = address()  # read late: before the client exists it may not be known
        cause = error.__context__ if isinstance(error, Boto3Error) and error.__context__ else error
        if isinstance(cause, ClientError):
            raise _translate_answer(cause, bucket, server, key, encryption) from error
        raise _translate_failure(cause, bucket, server) from error


def _translate_answer(error: ClientError, bucket: str, server: str, key: str, encryption: str | None) -> StoreError:
    """Translate an error that the server answered."""
    answer = error.response
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    said = answer.get("Error", {})
    code = said.get("Code", "")
    if status == 404 and error.operation_name == "HeadObject":
        code = "NoSuchKey"  # an answer to HEAD has no body that could say so
    message = said.get("Message", "")
    if encryption and _is_about_encryption(code, message):
        return EncryptionRefused(
            f"{server} does not encrypt with sse={encryption} ({code or status}): {message[:200].rstrip('.')}.",
            hint="Leave sse=… out of the store URL, or set up encryption on that server. With keys of the sidecar's own"
            " ([encryption]) what it stores is encrypted on any server.",
        )
    return translate_code(code, status, bucket, server, key, message)


def _is_about_encryption(code: str, message: str) -> bool:
    """Return whether a refusal is about server-side encryption. MinIO without a key service answers ``NotImplemented``,
    and only its message says what is meant.

    Not for credentials that may not use a key, or a key that does not exist (``KMS.…``): those have errors of their
    own.
    """
    if code in _DENIED | _NOT_ACCEPTED | _PASSING or code.startswith("KMS."):
        return False
    words = ("server side encryption", "server-side encryption", "kms")
    return code in _NO_ENCRYPTION or any(word in message.lower() for word in words)


def translate_code(code: str, status: int, bucket: str, server: str, key: str = "", message: str = "") -> StoreError:
    """Return the error for a server's answer. Codes come first: look-alikes agree on them more than on statuses."""
    what = f"{server} refused '{key or bucket}' ({code or status})"
    if code in _OBJECT_MISSING:
        return ObjectMissing(f"There is no object '{key}' in bucket '{bucket}' at {server}.")
    if code in _BUCKET_MISSING:
        return _make_no_bucket_error(bucket, server)
    if code in _WRONG_REGION or status in (301, 307):
        hint = "Add ?region=… with the bucket's region to the store URL."
        return StoreMissing(f"The bucket '{bucket}' is in another region than asked at {server}.", hint=hint)
    if status == 404:
        # Not a missing object, or a gateway whose S3 server is down would look like an empty store.
        hint = "Check ?endpoint=… of the store URL, and that the server behind it runs."
        return StoreMissing(f"{server} answers 404 as no S3 server does.", hint=hint)
    if code in _FULL or status == 507:
        return StoreFull(f"{server} has no room left for bucket '{bucket}' ({code or status}).")
    if code in _KEY_REFUSED:
        return KeyRefused(f"{server} takes no object of the name '{key}' ({code}).")
    if code == "RequestTimeTooSkewed":
        return StoreDenied(f"{what}.", hint="Set this machine's clock: it differs too much from the server's.")
    if code.startswith("KMS."):
        return StoreDenied(f"{what}.", hint="Check sse-kms-key-id and that these credentials may use that key.")
    if code == "InvalidObjectState":
        return StoreError(f"{what}.", hint="The object was moved to an archive class; restore it there first.")
    if code == "ConditionalRequestConflict":
        return WriteConflict(f"Another write of '{key}' was under way.")
    if code == "PreconditionFailed" or status == 412:
        return SwapLost(f"'{key}' was changed by someone else.", hint="Read it again, then repeat the change.")
    if code in ("NotImplemented", "MethodNotAllowed") or status in (405, 501):
        return Unsupported(f"{what}: it does not support this operation.")
    if code in _PASSING or status == 429 or status >= 500:
        return StoreUnreachable(f"{what}.")
    if code in _NOT_ACCEPTED or status == 401:
        return StoreDenied(
            f"{server} did not accept the credentials for bucket '{bucket}' ({code or status}).", hint=_WHO
        )
    if code in _DENIED or (status == 403 and code not in ("", "403")):
        return StoreDenied(f"{what}.")
    if status == 403:
        # An answer to HEAD has no message; and Supabase Storage has none for a wrong region.
        return StoreDenied(
            f"{what}, and does not say why.", hint=f"{_WHO} A wrong ?region=… is refused like this, too."
        )
    return StoreError(f"{what}: {message[:200]}" if message else f"{what}.")


def _translate_failure(error: BaseException, bucket: str, server: str) -> StoreError:
    """Return the error for a request that never got its answer."""
    from botocore import exceptions as boto

    if isinstance(error, boto.ProfileNotFound):
        return StoreDenied(f"{error}.", hint="Correct ?profile=… or AWS_PROFILE, or set AWS_ACCESS_KEY_ID.")
    if isinstance(
        error,
        boto.NoCredentialsError
        | boto.PartialCredentialsError
        | boto.CredentialRetrievalError
        | boto.TokenRetrievalError
        | boto.SSOError
        | boto.RefreshWithMFAUnsupportedError
        | boto.NoAuthTokenError,
    ):
        return StoreDenied(
            f"No usable credentials for bucket '{bucket}' at {server} ({type(error).__name__}).",
            hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or any other source that AWS tools know.",
        )
    if isinstance(error, boto.ParamValidationError) and "bucket" in str(error).lower():
        return _make_no_bucket_error(bucket, server)
    if isinstance(error, boto.InvalidRegionError | boto.NoRegionError | boto.UnknownRegionError):
        return StoreMissing(f"{server} cannot be used: {error}", hint="Correct ?region=… in the store URL.")
    if isinstance(error, boto.SSLError):
        return StoreUnreachable(
            f"No trusted connection to {server}.", hint="Name the authority of its certificate in AWS_CA_BUNDLE."
        )
    if isinstance(error, boto.FlexibleChecksumError):
        return StoreUnreachable(f"What {server} sent was damaged on the way or in the store: its checksum differs.")
    if isinstance(error, boto.IncompleteReadError | boto.ResponseStreamingError):
        return StoreUnreachable(f"The connection to {server} broke in the middle of an object.")
    if isinstance(error, boto.HTTPClientError | boto.EndpointConnectionError | boto.ConnectionError | OSError):
        return StoreUnreachable(f"No answer from {server} ({type(error).__name__}).")
    if isinstance(error, boto.BotoCoreError):
        return StoreError(f"{server} cannot be used: {error}")
    return StoreUnreachable(f"The connection to {server} broke ({type(error).__name__}).")


def _make_no_bucket_error(bucket: str, server: str) -> StoreMissing:
    return StoreMissing(
        f"There is no bucket '{bucket}' at {server}.",
        hint="Create it, or correct the store URL.",
    )
