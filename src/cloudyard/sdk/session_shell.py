"""What a session has its shell do: take up the state of the run before, run one command, write down its own.

Pure: bytes of shell programs. A program comes on stdin and is read whole before its first word runs, so that
no list of processes shows it and no command reads it. The state is a shell program too: the run that ends
writes it to a file of the sandbox, the client keeps it, and the next run's program begins with it.
"""

from __future__ import annotations

import shlex
from typing import Literal, NamedTuple

ShellName = Literal["bash", "sh"]
LOADER = 'eval "$(cat)"'
OPENER = """\
umask 077
for dir in "${TMPDIR:-/tmp}" /tmp; do
case $dir in /*) : >"$dir/$1" && echo "$dir/$1" && break; esac
done 2>/dev/null
command -v bash"""
"""Says in which file, of the name that it is given, the state is to go; and whether there is a bash."""


class State(NamedTuple):
    """A shell between two runs."""

    program: bytes
    """Makes another shell like it."""
    flags: str = ""
    """Of `x` and `v` those that were set. They come last, or they would show the programs of ours."""
    status: int = 0
    """Its `$?`."""


def argv_of(shell: ShellName, state: State | None) -> list[str]:
    """What runs a program. A state brings all variables along, so nothing else may."""
    clean = ["env", "-i"] if state is not None else []
    return [*clean, "/bin/sh" if shell == "sh" else "bash", "-c", LOADER]


def program(shell: ShellName, state: State | None, command: str, *, file: str, number: int) -> bytes:
    """The program of one run.

    Args:
        shell: what reads it.
        state: where the run before ended; None for a fresh shell.
        command: what the user wants.
        file: where the state goes.
        number: of the run, by which its state is told from an older one.
    """
    name, flags, status = shlex.quote(file), "", 0
    if state is not None:
        flags, status = f"set -{state.flags}\n" if state.flags else "", state.status
    parts = [
        # The file is there, for nobody else to read: a command that ends its shell leaves it as it is now.
        f"exec 3>&2 4>&1 >/dev/null 2>&1 </dev/null\numask 077\necho '# {number} begun' >{name}\n".encode(),
        f"__cy_text={shlex.quote(command)}\n__cy_flags='{flags}'\n".encode(),
        _CHECK.format(shell=_READER[shell]).encode(),
        _CD,
        state.program if state is not None else _FRESH[shell],
        f"__cy_file={name} __cy_number={number}\n".encode(),
        _SAVE[shell],
        _READY,
        f"__cy_return {status} {'||' if status else '&&'} {_EVAL[shell]}\n".encode(),
        b'\n{ __cy_save "$?" "$@"; } 2>/dev/null\n',
    ]
    return b"".join(parts)


def state_in(written: bytes, *, number: int, status: int) -> State | Literal["ended", "unwritten"]:
    """What a run has left in its file: the state, or that its shell ended itself, or nothing of this run."""
    head, _, rest = written.partition(b"\n")
    words = head.decode(errors="replace").split(" ")
    if words[:2] != ["#", str(number)]:
        return "unwritten"
    if words[2:] == ["begun"]:
        return "ended"
    if not rest.endswith(b"\n# end\n"):
        return "unwritten"
    return State(rest, "".join(flag for flag in "xv" if flag in "".join(words[2:])), status)


# A directory that is gone stays gone: as in any shell, names in it lead nowhere, and never elsewhere. What is
# missing of its path is there for a moment; where that cannot be, it is another directory that is gone.
_CD = b"""\
__cy_cd() {
cd -- "$1" || __cy_gone "$1" || { __cy_at=$(mktemp -d) && cd -- "$__cy_at" && rmdir -- "$__cy_at"; } ||
{ echo "The session cannot go back to $1." >&3; exit 125; }
}
__cy_gone() {
__cy_at=$1 __cy_left=0
while [ ! -d "$__cy_at/" ]; do __cy_at=${__cy_at%/*} __cy_left=$((__cy_left + 1)); done
mkdir -p -- "$1" && cd -- "$1" || return
__cy_at=$1
while [ "$__cy_left" -gt 0 ]; do
rmdir -- "$__cy_at"
__cy_at=${__cy_at%/*} __cy_left=$((__cy_left - 1))
done
}
"""

_FRESH: dict[ShellName, bytes] = {
    "bash": b"shopt -s expand_aliases\n__cy_late() { umask 0022; }\n",
    "sh": b"__cy_late() { umask 0022; }\n",
}

# What cannot be read is not run at all, and a shell of its own finds out: `eval` of such text ends an sh, and
# a bash 5.2 dies of some.
_READER: dict[ShellName, str] = {"bash": '"$BASH" -O extglob', "sh": "/bin/sh"}
_CHECK = """\
__cy_said=$(printf '%s\\n' "$__cy_text" | {shell} -n 2>&1) && __cy_said=
"""

_READY = b"""\
__cy_return() { return "$1"; }
__cy_late
unset -f __cy_late
if [ -n "$__cy_said" ]; then
printf '%s\n' "$__cy_said" >&3
__cy_save 2 "$@"
fi
exec >&4 2>&3 3>&- 4>&-
"""

_EVAL: dict[ShellName, str] = {
    "bash": 'builtin eval "$__cy_flags$__cy_text"',
    "sh": 'eval "$__cy_flags$__cy_text"',
}

# Options are asked for first, since the rest cannot be done under all of them, and taken up last.
_SAVE_BASH = rb"""
__cy_save() {
builtin local __cy_code=$1 __cy_letter __cy_name __cy_at
builtin shift
{
builtin printf '# %s %s\n__cy_late() {\n' "$__cy_number" "$-"
builtin umask -p
builtin trap -p
builtin alias -p
builtin set +o
builtin printf 'set +xv\n}\n'
builtin shopt -p
builtin set +eux
builtin shopt -u nocasematch
builtin printf '__cy_cd %q\n' "${DIRSTACK[0]}"
for ((__cy_at = ${#DIRSTACK[@]} - 1; __cy_at > 0; __cy_at--)); do
builtin printf 'pushd -n %q >/dev/null\n' "${DIRSTACK[__cy_at]}"
done
for __cy_letter in a b c d e f g h i j k l m n o p q r s t u v w x y z \
A B C D E F G H I J K L M N O P Q R S T U V W X Y Z _; do
builtin eval "for __cy_name in \"\${!$__cy_letter@}\"; do __cy_declare; done"
done
builtin declare -f
builtin printf '{\n'
builtin declare -F
builtin printf '} >/dev/null\nset --'
(($#)) && builtin printf ' %q' "$@"
builtin printf '\n# end\n'
} >|"$__cy_file"
builtin trap - EXIT
builtin exit "$__cy_code"
}
__cy_declare() {
case $__cy_name in
__cy_*|_|BASH|BASHOPTS|BASHPID|BASH_ALIASES|BASH_ARG[CV]|BASH_ARGV0|BASH_CMDS|BASH_COMMAND) ;;
BASH_EXECUTION_STRING|BASH_LINENO|BASH_MONOSECONDS|BASH_REMATCH|BASH_SOURCE|BASH_SUBSHELL) ;;
BASH_TRAPSIG|BASH_VERSINFO|BASH_VERSION|COMP_WORDBREAKS|DIRSTACK|EPOCHREALTIME|EPOCHSECONDS) ;;
EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|RANDOM|SECONDS|SHELLOPTS|SRANDOM|UID) ;;
*) builtin declare -p "$__cy_name" ;;
esac
}
"""

_SAVE_SH = rb"""
__cy_save() {
__cy_code=$1
{
printf '# %s %s\n__cy_late() {\numask ' "$__cy_number" "$-"
umask
trap
set +o
printf 'set +xv\n}\n'
set +eux
unset __cy_text __cy_flags __cy_said
set
export -p
readonly -p
printf '__cy_old=${OLDPWD-}\n__cy_cd "$PWD"\nOLDPWD=$__cy_old\n# end\n'
} >|"$__cy_file"
trap - EXIT
exit "$__cy_code"
}
"""

_SAVE: dict[ShellName, bytes] = {"bash": _SAVE_BASH, "sh": _SAVE_SH}
