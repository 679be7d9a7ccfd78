"Run code in a fresh session of processes, with a hard time limit, and see that nothing survives it."
import os,resource,shutil,signal,subprocess,sys,tempfile,textwrap,time,uuid,warnings
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # commands of this environment, such as nbdev-export; not resolved: a venv's python is a link
MARK = 'FXE_TEST_RUN'
_LEFTOVERS = {'PJRT_DEVICE', 'CPU_NUM_DEVICES', 'FASTAI_XLA_CORES', 'IN_TEST'}

def clean_env(env=None):
    "This process's environment without what would configure XLA or nbdev, then `env` on top"
    base = {k:v for k,v in os.environ.items() if k not in _LEFTOVERS and not k.startswith(('XLA_', 'PJRT_'))}
    return {**base, **{k:str(v) for k,v in (env or {}).items()}}

def _proc(pid, name):
    try: return Path(f'/proc/{pid}/{name}').read_bytes()
    except OSError: return b''  # it ended while we looked, or belongs to another user

def session_pids(sid, mark):
    "Living processes of session `sid`, and any that left it by `setsid` but still carry `mark` in the environment"
    res = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        # the fields after the command, which is in parentheses and may hold spaces: state ppid pgrp session
        stat = _proc(pid, 'stat').rpartition(b')')[2].split()
        if len(stat) < 4 or stat[0] in (b'Z', b'X'): continue
        if int(stat[3]) == sid or mark in _proc(pid, 'environ').split(b'\0'): res.append(int(pid))
    return res

def _wait(gone, seconds):
    end = time.monotonic() + seconds
    while not (done := gone()) and time.monotonic() < end: time.sleep(0.05)
    return done

def _kill(pids, sig):
    for pid in pids:
        with suppress(ProcessLookupError): os.kill(pid, sig)

def run_fresh(args, timeout=180, env=None, cwd=None) -> str:
    """Run `args` as a session of its own and return what it printed (stdout and stderr together).
    A non-zero exit, a run longer than `timeout` seconds, or a process that survives is an AssertionError with that output.
    `env` is added to a cleaned environment (see `clean_env`)."""
    __tracebackhide__ = True  # pytest then shows the caller and the output, not this function
    args,mark = [str(a) for a in args],uuid.uuid4().hex
    # faulthandler: a process that hangs says where, when we abort it after the time limit
    env = {**clean_env(env), 'PYTHONFAULTHANDLER':'1', MARK:mark}
    # A file and not a pipe: a survivor would hold the pipe open and we would wait for it
    with tempfile.TemporaryFile() as out:
        p = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                             cwd=cwd, env=env, start_new_session=True,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # ignored where a shell runs the tests in the background
        pids,faults = (lambda: session_pids(p.pid, f'{MARK}={mark}'.encode())),[]
        try:
            with suppress(ProcessLookupError): resource.prlimit(p.pid, resource.RLIMIT_CORE, (0,0))
            try: p.wait(timeout)
            except subprocess.TimeoutExpired:
                faults.append(f'still running after {timeout} s')
                _kill(pids(), signal.SIGABRT)
                _wait(lambda: p.poll() is not None and not pids(), 2)
            else:
                if p.returncode: faults.append(f'exit code {p.returncode}')
                if not _wait(lambda: not pids(), 2):
                    names = [f"{o} {_proc(o, 'cmdline').replace(bytes(1), b' ').decode(errors='replace')[:200]}" for o in pids()]
                    if names: faults.append('processes that survive it:\n  ' + '\n  '.join(names))
        finally:
            end = time.monotonic() + 5
            while (left := pids()) and time.monotonic() < end:  # again and again: one may start another while we kill
                _kill(left, signal.SIGKILL)
                time.sleep(0.05)
            p.wait(5)
        out.seek(0)
        text = out.read().decode(errors='replace')
    if faults: raise AssertionError(f"{' '.join(args)}: {'; '.join(faults)}\n--- output ---\n{text}")
    return text

# About once in a thousand launches the CPU client of torch_xla 2.9 dies under several emulated cores, by a segmentation fault or by
# a failed check of its own; the cause is not known. The library reports it as an error and the next call works (test_launch). Tests of
# other things are run once more, with a warning that shows in the summary. A hang, or an error in Python, is never run again.
_NATIVE_CRASHES = 'killed by signal 11 (SIGSEGV)', 'pjrt_device == pjrt_data->buffer->device()'

def run_code(code, timeout=180, env=None, cwd=None) -> str:
    "Run python source in a fresh interpreter that sees this checkout, in an empty working directory; as `run_fresh`"
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory() as d:
        script,empty = Path(d)/'script.py',Path(d)/'cwd'
        script.write_text(textwrap.dedent(code), encoding='utf-8')
        empty.mkdir()
        run = lambda: run_fresh([sys.executable, script], timeout=timeout, env={'PYTHONPATH':ROOT, **(env or {})}, cwd=cwd or empty)
        try: return run()
        except AssertionError as e:
            if not any(o in str(e) for o in _NATIVE_CRASHES): raise
            warnings.warn(f'a native crash of an emulated core, run once more:\n{str(e)[-4000:]}')
            shutil.rmtree(empty); empty.mkdir()
        return run()
