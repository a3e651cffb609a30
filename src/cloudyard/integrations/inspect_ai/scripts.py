"""What is run in a sandbox on the plugin's own behalf: the sample's user and directory, and file operations.

Files are read and written by commands, as the sample's user: what that user may not do must fail, and the
yard's own file operations have root's rights in a sandbox. Programs are looked for in the system's
directories alone, because the agent may have put others first on its own path.
"""

from __future__ import annotations

SHELL = "/bin/sh"
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}

ACCOUNT, ACCOUNT_ID = "agent", 1000

# Run as the image's own user. Prints the name of an ordinary account, which it makes if there is none, and
# the image's directory. The name is empty where the image's user is an ordinary one, or none is asked for.
# $1: name of the account; empty: none is asked for. $2: its uid and gid.
FIND_ACCOUNT = """
set -eu
here=$(pwd)
found() { printf '%s\\n%s\\n' "$1" "$here"; exit; }
if [ -z "$1" ] || [ "$(id -u)" != 0 ]; then found ''; fi
while IFS=: read -r name _ id _; do
    if [ "$name" = "$1" ] || [ "$id" = "$2" ]; then found "$name"; fi
done </etc/passwd
shell=/bin/sh
[ ! -x /bin/bash ] || shell=/bin/bash
echo "$1:x:$2:$2::/home/$1:$shell" >>/etc/passwd
echo "$1:x:$2:" >>/etc/group
mkdir -p "/home/$1"
chown "$2:$2" "/home/$1"
found "$1"
"""

# Run as the sample's user. Prints its directory: the image's if it can write there, else its home.
# $1: the image's directory.
FIND_DIRECTORY = '{ cd -- "$1" && [ -w . ]; } 2>/dev/null || cd && pwd'

# Run as the sample's user. Prints its ids.
FIND_IDS = 'echo "$(id -u):$(id -g)"'

# Run as root. $1: a directory. $2: ids of whom it belongs to if it has to be made.
MAKE_DIRECTORY = '[ -d "$1" ] || { mkdir -p -- "$1" && chown -- "$2" "$1"; }'

# A pipe would be waited for until somebody opens its other end.
_NO_PIPE = """
[ ! -p "$1" ] || { echo "$1: Invalid argument" >&2; exit 1; }
"""

# $1: a file. $2: how many bytes of it at most.
READ = _NO_PIPE + 'exec head -c "$2" -- "$1"'

# $1: a file, which gets what comes on stdin and keeps its owner and mode if it exists.
WRITE = _NO_PIPE + 'case $1 in */*) mkdir -p -- "${1%/*}/" || exit ;; esac\nexec cat >"$1"'


def command(script: str, *arguments: str) -> list[str]:
    """The command that runs a script with these arguments."""
    return [SHELL, "-c", script, SHELL, *arguments]
