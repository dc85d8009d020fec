#!/bin/sh
# Installs FreeToken from this checkout, for this user alone; nothing runs as root and nothing outside these is written:
#   $FREETOKEN_HOME (default ~/.freetoken)   the environment (venv/), models, logs
#   ~/.local/bin/ft                          a link, where that name is free
# Safe to run again: what is there and whole is kept, what is broken is moved aside and made anew.
# Needs python3 >= 3.11 with venv. pip's own configuration (index, proxy, PIP_FIND_LINKS) is honoured.
set -eu

usage() {
    cat <<'TEXT'
usage: sh installers/linux/install.sh [--demo [--ask TEXT]] [--replace]

  --demo       then start the daemon, get the demo model (93 MB), load it and open a chat
  --ask TEXT   with --demo: ask this one question instead, show the counts and end
  --replace    move a state folder of another program aside instead of stopping
  --help       this text

FREETOKEN_HOME names the state folder (default ~/.freetoken).
TEXT
}

step() { printf '\n== %s\n' "$*"; }
say() { printf '   %s\n' "$*"; }

# fail CODE WHAT FIX...: one error line and what to do about it, as ft itself writes them
fail() {
    code=$1
    printf 'error: %s\n' "$2" >&2
    shift 2
    for fix in "$@"; do printf '  fix: %s\n' "$fix" >&2; done
    exit "$code"
}

# ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────────────
demo=no replace=no ask=''
while [ $# -gt 0 ]; do
    case $1 in
        --demo) demo=yes ;;
        --replace) replace=yes ;;
        --ask)
            [ $# -ge 2 ] && [ -n "$2" ] || fail 2 '--ask needs a question' '--ask "What is the capital of France?"'
            ask=$2
            shift
            ;;
        --ask=?*) ask=${1#--ask=} ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) fail 2 "the installer does not take $1" 'sh installers/linux/install.sh --help' ;;
    esac
    shift
done
[ -z "$ask" ] || [ $demo = yes ] || fail 2 '--ask needs a model to answer' 'add --demo'

checkout=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
grep -qs '^name = "freetoken"' "$checkout/pyproject.toml" ||
    fail 1 "$checkout is not a FreeToken checkout" 'run the installer from a clone: sh installers/linux/install.sh'
: "${HOME:?the installer needs HOME}"
state=${FREETOKEN_HOME:-$HOME/.freetoken}
case $state in /*) ;; *) state=$PWD/$state ;; esac
export FREETOKEN_HOME="$state"
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_USER # they would send the packages somewhere else
stamp=$(date +%Y%m%d-%H%M%S)

# ── python ───────────────────────────────────────────────────────────────────────────────────────────────────────────
step 'Python'
python='' old=''
for name in python3 python3.14 python3.13 python3.12 python3.11; do
    path=$(command -v "$name") || continue
    if "$path" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$path
        break
    fi
    old="$old $path"
done
[ -n "$python" ] ||
    fail 1 "Python 3.11 or newer is needed${old:+; found only older ones:$old}" 'sudo apt-get install python3 python3-venv'
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail 1 "$python (Python $version) has no venv module" "sudo apt-get install python3-venv" "sudo apt-get install python$version-venv"
say "$python (Python $version)"

# ── the state folder ─────────────────────────────────────────────────────────────────────────────────────────────────
step "State folder $state"
mark=$state/freetoken-home.json
if [ -e "$state" ] && [ ! -f "$mark" ] && { [ ! -d "$state" ] || [ -n "$(ls -A "$state")" ]; }; then
    # shellcheck disable=SC2012  # names for a person to recognise, not for a program
    found=$(ls -A "$state" | head -n 5 | tr '\n' ' ')
    [ $replace = yes ] ||
        fail 2 "$state belongs to another program (the public FreeToken uses this name too); it holds: $found" \
            "sh installers/linux/install.sh --replace   moves it to $state.replaced-$stamp" \
            'FREETOKEN_HOME=~/freetoken sh installers/linux/install.sh   uses another folder'
    mv -- "$state" "$state.replaced-$stamp" || fail 1 "$state cannot be moved" 'choose another folder with FREETOKEN_HOME'
    say "moved what was there to $state.replaced-$stamp"
fi
if ! { mkdir -p -- "$state" && chmod 700 "$state"; }; then
    fail 1 "$state cannot be made" 'choose a folder of yours: FREETOKEN_HOME=/path sh installers/linux/install.sh'
fi
if [ ! -f "$mark" ] && ! { printf '{"layout": 1}\n' >"$mark.$$" && mv -- "$mark.$$" "$mark"; }; then
    fail 1 "$state cannot be written to" "look at the disk: df -h '$state'"
fi
say 'ours'

# ── the environment ──────────────────────────────────────────────────────────────────────────────────────────────────
step 'Environment'
venv=$state/venv
whole() {
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11) or sys.prefix == sys.base_prefix)' &&
        "$venv/bin/python" -m pip --version
}
if [ -e "$venv" ] && ! whole >/dev/null 2>&1; then
    mv -- "$venv" "$venv.broken-$stamp"
    say "the old one is broken (an interrupted install, or its Python is gone): moved to $venv.broken-$stamp"
fi
if [ -x "$venv/bin/ft" ] && "$venv/bin/ft" daemon status >/dev/null 2>&1; then
    say 'a daemon runs from it: stopping it first'
    "$venv/bin/ft" daemon stop || fail 1 'the running daemon did not stop' "$venv/bin/ft daemon status" 'end it, then run the installer again'
fi
if [ ! -e "$venv" ]; then
    "$python" -m venv -- "$venv" || fail 1 "python3 -m venv failed" "sudo apt-get install python$version-venv" "look at the disk: df -h '$state'"
    say "made $venv"
fi

step 'Packages (the first time this takes minutes: torch is large)'
if [ -t 1 ]; then quiet=''; else quiet=--quiet; fi
install() {
    # shellcheck disable=SC2086  # $quiet is one word or none
    "$venv/bin/python" -m pip install $quiet --disable-pip-version-check --no-input --upgrade --upgrade-strategy only-if-needed "$@" "$checkout"
}
if ! install; then
    say 'pip failed; once more without its cache (a proxy, a cache or a mirror may have changed or cut a file)'
    install --no-cache-dir ||
        fail 1 'the packages could not be installed; pip says why above' \
            'no connection: set the proxy (HTTPS_PROXY), or a mirror in pip.conf (index-url)' \
            'hashes that do not match: a proxy or mirror changes files; try another network' \
            "no space: df -h '$state'; torch needs a few GB" \
            'then run the installer again: it goes on from here'
fi
"$venv/bin/ft" --version >/dev/null || fail 1 "$venv/bin/ft does not run" "remove $venv and run the installer again"
say "$("$venv/bin/ft" --version) in $venv"

# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────
step 'Command'
link=$HOME/.local/bin/ft
ft=$venv/bin/ft
case $(readlink "$link" 2>/dev/null || true) in
    "$ft") say "$link" ;;
    *)
        if [ -e "$link" ] || [ -L "$link" ]; then
            say "$link belongs to another program and stays; use $ft"
        elif mkdir -p "$HOME/.local/bin" && ln -s "$ft" "$link"; then
            say "$link -> $ft"
        else
            say "no link could be made at $link; use $ft"
        fi
        ;;
esac
other=$(command -v ft || true)
if [ -z "$other" ]; then
    say "not on your PATH yet: export PATH=\"\$HOME/.local/bin:\$PATH\""
elif [ "$(readlink -f "$other")" != "$(readlink -f "$ft")" ]; then
    say "note: 'ft' in your shell is another program, $other"
fi
[ "$state" = "$HOME/.freetoken" ] || say "this state folder is not the default: export FREETOKEN_HOME='$state'"

# ── the demo ─────────────────────────────────────────────────────────────────────────────────────────────────────────
if [ $demo = no ]; then
    step 'Done'
    say 'next: ft serve --demo, or ft daemon start and ft load /path/to/a/model'
    exit 0
fi
step 'Demo'
"$ft" daemon start
"$ft" pull demo
"$ft" load demo
if [ -n "$ask" ]; then
    step "$ask"
    # the likeliest answer, and a short one: a model this small wanders off when it samples
    "$ft" chat --model demo --temperature 0 --max-tokens 256 --ask "$ask"
    step 'Where the memory went'
    "$ft" status
elif [ -t 0 ]; then
    step 'Chat'
    "$ft" chat --model demo
fi
