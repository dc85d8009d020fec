"""Every error a user can cause or must understand, as one tree; each leaf has a stable code. Pure, stdlib only.

FreeTokenError
├── UsageError            what was asked is wrong (400, exit 2)
├── CheckpointError       what is on disk is wrong or unsupported (422, exit 1)
├── ModelError            the model asked for is not there or not ready (404, 409, 503)
├── PlanError             it does not fit this machine (409, exit 6)
├── EngineError           the engine refused, failed or died (5xx, exit 7)
└── DaemonError           the daemon cannot be reached, started or trusted (exit 2, 3, 4, 5, 8)

`detail` is one sentence with numbers; `fixes` are things to do, each a sentence or a command. Texts for HTTP and for
terminals are made from these fields elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

Number = int | float | str


class FreeTokenError(Exception):
    """Base of the tree. Class attributes are the leaf's identity; instance fields are the occasion's facts."""

    code: ClassVar[str] = "INTERNAL"
    title: ClassVar[str] = "Internal error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    openai_code: ClassVar[str | None] = None  # the code that OpenAI's clients know, where one exists

    def __init__(
        self,
        detail: str,
        *,
        numbers: Mapping[str, Number] | None = None,
        fixes: Sequence[str] = (),
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.numbers: dict[str, Number] = dict(numbers or {})
        self.fixes = tuple(fixes)
        self.param = param
        self.retry_after_s = retry_after_s


# ── what was asked ──────────────────────────────────────────────────────────────────────────────────────────────────
class UsageError(FreeTokenError):
    code, title, http_status, exit_code = "BAD_REQUEST", "The request is not valid", 400, 2


class MalformedBody(UsageError):
    code, title = "MALFORMED_BODY", "The body is not what this route takes"


class UnsupportedField(UsageError):
    code, title = "UNSUPPORTED_FIELD", "A field is not supported"


class UnsupportedContent(UsageError):
    code, title = "UNSUPPORTED_CONTENT", "The loaded model cannot read this kind of content"


class ContextLengthExceeded(UsageError):
    code, title, openai_code = "CONTEXT_LENGTH_EXCEEDED", "The prompt is too long", "context_length_exceeded"


class TemplateError(UsageError):
    code, title = "TEMPLATE_ERROR", "The model's chat template refused the messages"


class SettingError(UsageError):
    code, title = "BAD_SETTING", "A setting is not valid"


class RouteNotFound(UsageError):
    code, title, http_status = "ROUTE_NOT_FOUND", "No such route", 404


class MethodNotAllowed(UsageError):
    code, title, http_status = "METHOD_NOT_ALLOWED", "The route does not take this method", 405


class DownloadNotFound(UsageError):
    code, title, http_status = "DOWNLOAD_NOT_FOUND", "No such download", 404


class DownloadStateRefused(UsageError):
    code, title, http_status = "DOWNLOAD_STATE", "The download is not in a state for this", 409


class VariantNeeded(UsageError):
    code, title = "VARIANT_NEEDED", "The repository holds several models; say which"


class DigestNeeded(UsageError):
    code, title = "DIGEST_NEEDED", "Nothing says what the file must contain"


class UnsafeName(UsageError):
    code, title, http_status, exit_code = "UNSAFE_NAME", "The name is not safe to use", 400, 5


class IdempotencyKeyReused(UsageError):
    code, title, http_status = "IDEMPOTENCY_KEY_REUSED", "The idempotency key belongs to another request", 422


class OperationNotFound(UsageError):
    code, title, http_status = "OPERATION_NOT_FOUND", "No such operation", 404


# ── what is on disk ─────────────────────────────────────────────────────────────────────────────────────────────────
class CheckpointError(FreeTokenError):
    code, title, http_status = "CHECKPOINT_INVALID", "The model's files are not usable", 422


class ConfigMissing(CheckpointError):
    code, title = "CONFIG_MISSING", "config.json is missing"


class ConfigInvalid(CheckpointError):
    code, title = "CONFIG_INVALID", "config.json cannot be used"


class UnsupportedArchitecture(CheckpointError):
    code, title = "UNSUPPORTED_ARCHITECTURE", "This model family is not supported"


class UnsupportedEncoding(CheckpointError):
    code, title = "UNSUPPORTED_ENCODING", "This tensor format is not supported"


class WeightsMissing(CheckpointError):
    code, title = "WEIGHTS_MISSING", "Weight files are missing"


class PickleOnly(CheckpointError):
    code, title = "PICKLE_ONLY", "Only pickle weights were found"


class FileCorrupt(CheckpointError):
    code, title = "FILE_CORRUPT", "A model file is damaged"


class FileUnreadable(CheckpointError):
    code, title = "FILE_UNREADABLE", "A model file cannot be read"


class TensorMismatch(CheckpointError):
    code, title = "TENSOR_MISMATCH", "The tensors in the files are not those the configuration describes"


class TokenizerMissing(CheckpointError):
    code, title = "TOKENIZER_MISSING", "The model has no tokenizer that can be read"


class DownloadFailed(CheckpointError):
    code, title, http_status, retryable = "DOWNLOAD_FAILED", "The download did not complete", 502, True


class NothingToLoad(CheckpointError):
    code, title = "NOTHING_TO_LOAD", "The repository holds no weights that can be loaded"


class RepoNotFound(DownloadFailed):
    code, title, http_status, retryable = "REPO_NOT_FOUND", "The hub has no such repository", 404, False


class RevisionNotFound(RepoNotFound):
    code, title = "REVISION_NOT_FOUND", "The repository has no such revision"


class RepoGated(DownloadFailed):
    code, title, http_status, retryable = "REPO_GATED", "The model's owner asks for an agreement first", 403, False


class HubTokenRefused(DownloadFailed):
    code, title, http_status, retryable = "HUB_TOKEN_REFUSED", "The hub does not accept the token", 403, False


class HubUnavailable(DownloadFailed):
    code, title, http_status = "HUB_UNAVAILABLE", "The hub does not answer as it should", 502


class DownloadStalled(DownloadFailed):
    code, title, http_status, exit_code = "DOWNLOAD_STALLED", "No data arrived for too long", 504, 8


class FileChanged(DownloadFailed):
    code, title = "FILE_CHANGED", "The file on the server is not the one that was announced"


class HashMismatch(DownloadFailed):
    code, title = "HASH_MISMATCH", "A file arrived with the wrong content"


class DiskFull(DownloadFailed):
    code, title, http_status, retryable = "DISK_FULL", "The disk has no room for it", 507, False


# ── the model asked for ─────────────────────────────────────────────────────────────────────────────────────────────
class ModelError(FreeTokenError):
    code, title, http_status = "MODEL_ERROR", "The model cannot answer", 409


class ModelNotFound(ModelError):
    code, title, http_status, openai_code = "MODEL_NOT_FOUND", "No such model", 404, "model_not_found"


class ModelNotLoaded(ModelError):
    code, title = "MODEL_NOT_LOADED", "The model is not loaded"


class LifecycleBusy(ModelError):
    code, title, retryable = "LIFECYCLE_BUSY", "Another load or unload is running", True


class LoadCancelled(ModelError):
    code, title = "LOAD_CANCELLED", "The load was cancelled"


# ── does it fit ─────────────────────────────────────────────────────────────────────────────────────────────────────
class PlanError(FreeTokenError):
    """`plan` is the plan JSON of what was refused, for callers that want more than a sentence."""

    code, title, http_status, exit_code = "DOES_NOT_FIT", "The model does not fit this machine", 409, 6
    plan: Mapping[str, Any] | None = None


class CannotEstimate(PlanError):
    code, title = "CANNOT_ESTIMATE", "The memory it needs is not known"


class HostRamTooSmall(PlanError):
    code, title = "HOST_RAM_TOO_SMALL", "There is not enough memory"


class WeightsDoNotFit(PlanError):
    code, title = "WEIGHTS_DO_NOT_FIT", "The weights do not fit"


class FixedPartDoesNotFit(PlanError):
    code, title = "FIXED_PART_DOES_NOT_FIT", "What the model needs in any case does not fit"


class KvTooLarge(PlanError):
    code, title = "KV_TOO_LARGE", "The context asked for does not fit"


class ExpertCacheTooLarge(PlanError):
    code, title = "EXPERT_CACHE_TOO_LARGE", "The expert slots asked for do not fit"


class PrefillDoesNotFit(PlanError):
    code, title = "PREFILL_DOES_NOT_FIT", "A prefill chunk does not fit"


class RatioTooLow(PlanError):
    code, title = "RATIO_TOO_LOW", "Too little of the free memory may be used"


class RatioTooHigh(PlanError):
    code, title = "RATIO_TOO_HIGH", "More memory was used than is there"


class OtherProcessesHoldMemory(PlanError):
    code, title = "OTHER_PROCESSES_HOLD_MEMORY", "Other programs hold the memory that it needs"


# ── the engine ──────────────────────────────────────────────────────────────────────────────────────────────────────
class EngineError(FreeTokenError):
    code, title, http_status, exit_code = "ENGINE_ERROR", "The engine failed", 500, 7


class EngineDied(EngineError):
    code, title, http_status, retryable = "ENGINE_DIED", "The engine process ended", 503, True


class EngineStartFailed(EngineError):
    code, title = "ENGINE_START_FAILED", "The engine process did not start"


class EngineProtocolError(EngineError):
    code, title = "ENGINE_PROTOCOL", "The engine speaks another protocol"


class LoadTimeout(EngineError):
    code, title, http_status, exit_code = "LOAD_TIMEOUT", "The load made no progress", 504, 8


class OutOfMemory(EngineError):
    code, title, http_status = "OUT_OF_MEMORY", "The engine ran out of memory for this request", 503


class QueueFull(EngineError):
    code, title, http_status, retryable, openai_code = (
        "QUEUE_FULL",
        "Too many requests are waiting",
        429,
        True,
        "rate_limit_exceeded",
    )


class QueueTimeout(EngineError):
    code, title, http_status, retryable, exit_code = "QUEUE_TIMEOUT", "The request waited too long", 503, True, 8


# ── the daemon ──────────────────────────────────────────────────────────────────────────────────────────────────────
class DaemonError(FreeTokenError):
    code, title = "DAEMON_ERROR", "The daemon cannot do this"


class DaemonNotReachable(DaemonError):
    code, title, http_status, exit_code = "DAEMON_NOT_REACHABLE", "No FreeToken daemon answers", 503, 3


class Unauthorized(DaemonError):
    code, title, http_status, exit_code, openai_code = (
        "UNAUTHORIZED",
        "A valid token is needed",
        401,
        4,
        "invalid_api_key",
    )


class HostRefused(DaemonError):
    code, title, http_status, exit_code = "HOST_REFUSED", "The Host header is not one of ours", 400, 5


class OriginRefused(DaemonError):
    code, title, http_status, exit_code = "ORIGIN_REFUSED", "This origin may not use the API", 403, 5


class ContentTypeRefused(DaemonError):
    code, title, http_status, exit_code = "CONTENT_TYPE_REFUSED", "Send application/json", 415, 5


class BodyTooLarge(DaemonError):
    code, title, http_status, exit_code = "BODY_TOO_LARGE", "The body is larger than this route takes", 413, 5


class PortInUse(DaemonError):
    code, title, exit_code = "PORT_IN_USE", "The port is taken", 2


class HomeNotOurs(DaemonError):
    code, title, exit_code = "HOME_NOT_OURS", "The state folder belongs to another program", 2


class BindRefused(DaemonError):
    code, title, exit_code = "BIND_REFUSED", "An address beyond this machine needs an API key", 5


class DownloadHostRefused(DaemonError):
    code, title, http_status, exit_code = "DOWNLOAD_HOST_REFUSED", "Nothing is downloaded from this host", 403, 5


class TooManyStreams(DaemonError):
    code, title, http_status, exit_code, retryable = "TOO_MANY_STREAMS", "Too many streams are open", 429, 5, True


class DeadlineExceeded(DaemonError):
    code, title, http_status, exit_code, retryable = "DEADLINE_EXCEEDED", "It took too long", 504, 8, True


def leaves(root: type[FreeTokenError] = FreeTokenError) -> dict[str, type[FreeTokenError]]:
    """Every class of the tree by its code, for GET /problems and for rebuilding an error that crossed the wire."""
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= leaves(child)
    return found


def from_code(
    code: str, detail: str, numbers: Mapping[str, Number] | None = None, fixes: Sequence[str] = ()
) -> FreeTokenError:
    """The error that `code` names; EngineError for a code this build does not know."""
    return leaves().get(code, EngineError)(detail, numbers=numbers, fixes=fixes)
