"Every notebook runs from top to bottom, each in a session of processes of its own"
import pytest
from helpers import BIN,ROOT,run_fresh

nbs = ROOT/'nbs'

def _is_run(path): return not any(o.startswith(('_', '.')) for o in path.relative_to(nbs).parts)  # nbdev's rule

@pytest.mark.parametrize('nb', [o.relative_to(nbs).as_posix() for o in sorted(nbs.rglob('*.ipynb')) if _is_run(o)])
def test_notebook(nb): run_fresh([BIN/'nbdev-test', nbs/nb], timeout=300, cwd=ROOT)
