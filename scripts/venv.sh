#!/usr/bin/env bash
# Print the path of a python that has all the demo and the tests need, after making its virtual environment if need be.
# One environment serves every clone: the package itself is not in it, run with PYTHONPATH set to the clone.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
key=$("$python" "$here/requirements.py" --key)
venv=${XDG_CACHE_HOME:-$HOME/.cache}/fastai_xla_extensions/venv-$key

# The stamp is written last, so an install that was cut short is never taken for a finished one.
# Starting python as well: the interpreter that the environment was made from may be gone.
ready() { [ -f "$venv/.complete" ] && "$venv/bin/python" -c '' 2>/dev/null; }

install() {
    echo "Installing into $venv: 3 to 4 minutes and 7 GB of disk, once (torch from PyPI brings its CUDA libraries)." >&2
    "$python" -m venv --clear "$venv" >&2
    "$python" "$here/requirements.py" | "$venv/bin/python" -m pip install --disable-pip-version-check -r /dev/stdin >&2
    touch "$venv/.complete"
}

if ! ready; then
    mkdir -p "$(dirname "$venv")"
    if command -v flock >/dev/null; then
        exec 9>"$venv.lock"
        flock --nonblock 9 || { echo "Waiting for another install into $venv" >&2; flock 9; }
    fi
    ready || install
fi
echo "$venv/bin/python"
