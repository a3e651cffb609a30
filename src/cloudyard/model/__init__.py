"""The nouns of Cloudyard: what a user asks for, what a step is, what comes back.

Frozen msgspec structs and the limits that hold for them. Structs that users send forbid unknown fields and
name them; what our own parts send each other skips them, so that a newer part can talk to an older one.
Schemas only grow: a new field has a default, a type never changes, a field is never reordered
(`tests/golden/messages` fails on change).

This package does no I/O, reads no clock and knows no server.
"""

from cloudyard.model.basics import (
    CHUNK_BYTES_MAX as CHUNK_BYTES_MAX,
    COMMAND_BYTES_MAX as COMMAND_BYTES_MAX,
    CPU_MAX as CPU_MAX,
    CPU_MIN as CPU_MIN,
    CREATE_MANY_MAX as CREATE_MANY_MAX,
    GIB as GIB,
    KEY_BYTES_MAX as KEY_BYTES_MAX,
    KIB as KIB,
    LABEL_BYTES_MAX as LABEL_BYTES_MAX,
    LABELS_MAX as LABELS_MAX,
    LIST_DIR_MAX as LIST_DIR_MAX,
    MEMORY_MAX_BYTES as MEMORY_MAX_BYTES,
    MEMORY_MIN_BYTES as MEMORY_MIN_BYTES,
    MIB as MIB,
    NAME as NAME,
    OUTPUT_INLINE_BYTES as OUTPUT_INLINE_BYTES,
    OUTPUT_LIMIT_DEFAULT_BYTES as OUTPUT_LIMIT_DEFAULT_BYTES,
    OUTPUT_LIMIT_MAX_BYTES as OUTPUT_LIMIT_MAX_BYTES,
    PATH_BYTES_MAX as PATH_BYTES_MAX,
    PIDS_MAX as PIDS_MAX,
    PIDS_MIN as PIDS_MIN,
    SANDBOX_ID as SANDBOX_ID,
    STREAM_WINDOW as STREAM_WINDOW,
    TIMEOUT_MAX_S as TIMEOUT_MAX_S,
    TTL_MAX_S as TTL_MAX_S,
    TTL_MIN_S as TTL_MIN_S,
    BackendName as BackendName,
    CommandId as CommandId,
    EdgeId as EdgeId,
    FileKind as FileKind,
    ProjectId as ProjectId,
    SandboxId as SandboxId,
    SandboxState as SandboxState,
    StreamName as StreamName,
    edge_of as edge_of,
    parse_size as parse_size,
)
from cloudyard.model.calls import (
    CALL_BYTES_MAX as CALL_BYTES_MAX,
    CALL_CASES_MAX as CALL_CASES_MAX,
    CALL_FILES_MAX as CALL_FILES_MAX,
    CALL_IMAGE_DEFAULT as CALL_IMAGE_DEFAULT,
    CALL_MANY_MAX as CALL_MANY_MAX,
    CALL_MEMORY_DEFAULT as CALL_MEMORY_DEFAULT,
    CALL_OUTPUT_DEFAULT_BYTES as CALL_OUTPUT_DEFAULT_BYTES,
    CALL_OUTPUT_MAX_BYTES as CALL_OUTPUT_MAX_BYTES,
    CALL_PRELOAD_MAX as CALL_PRELOAD_MAX,
    CALL_TIMEOUT_DEFAULT_S as CALL_TIMEOUT_DEFAULT_S,
    CALL_TIMEOUT_MAX_S as CALL_TIMEOUT_MAX_S,
    CallPhase as CallPhase,
    CallResult as CallResult,
    CallSpec as CallSpec,
    Case as Case,
    CaseResult as CaseResult,
    Comparison as Comparison,
    Language as Language,
    Verdict as Verdict,
)
from cloudyard.model.checks import (
    check_command as check_command,
    check_env as check_env,
    check_key as check_key,
    check_path as check_path,
    normalised as normalised,
)
from cloudyard.model.images import (
    Image as Image,
    ImageConfig as ImageConfig,
)
from cloudyard.model.operations import (
    AnyOp as AnyOp,
    Exec as Exec,
    GetSandbox as GetSandbox,
    KeepAlive as KeepAlive,
    KillAll as KillAll,
    ListCommands as ListCommands,
    ListDir as ListDir,
    MakeDir as MakeDir,
    Op as Op,
    ReadFile as ReadFile,
    ReadOutput as ReadOutput,
    Remove as Remove,
    Resize as Resize,
    SendStdin as SendStdin,
    Signal as Signal,
    Start as Start,
    Stat as Stat,
    StopSandbox as StopSandbox,
    UploadChunk as UploadChunk,
    UploadCommit as UploadCommit,
    Wait as Wait,
    WriteFile as WriteFile,
)
from cloudyard.model.parts import (
    EDGE_SILENT_S as EDGE_SILENT_S,
    HEARTBEAT_S as HEARTBEAT_S,
    EdgeLoad as EdgeLoad,
    ErrorBody as ErrorBody,
    Heartbeat as Heartbeat,
)
from cloudyard.model.results import (
    AnyResult as AnyResult,
    CommandInfo as CommandInfo,
    CommandList as CommandList,
    DirListing as DirListing,
    Done as Done,
    ExecResult as ExecResult,
    Fault as Fault,
    FaultLabel as FaultLabel,
    FileChunk as FileChunk,
    FileInfo as FileInfo,
    OutputChunk as OutputChunk,
    Result as Result,
    SandboxInfo as SandboxInfo,
)
from cloudyard.model.specs import (
    CommandSpec as CommandSpec,
    CreateRequest as CreateRequest,
    Pty as Pty,
    SandboxSpec as SandboxSpec,
)
