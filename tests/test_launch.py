"`launch` runs a function on every core: what comes back, what a fault does, and that nothing is left behind"
from textwrap import dedent
import pytest
from helpers import run_code

START = '''
import gc, os, re, signal, subprocess, sys, tempfile, threading, time
import multiprocessing as mp
from pathlib import Path
import torch
from fastai_xla_extensions.core import *
from fastai_xla_extensions.launch import CoreTraceback, launch
'''

# Emulated cores are threads of one process, and can reduce
THREADS = '''
threads = True
emulate_cores(4)
def wait(core):
    "Wait for the others in a collective"
    while True: all_reduce(torch.ones(2, device=core.device)); sync()
'''

# One process per core, as on a TPU v4 and later: torch_xla believes in a plugin with four chips. Each process has one CPU
# device, so nothing can be reduced; rank and number of cores are what such a plugin's topology would give.
PROCESSES = '''
threads = False
os.environ['PJRT_DEVICE'] = 'CPU'
import torch_xla.runtime as xr
from torch_xla.experimental import plugins
class FourChips:
    def physical_chip_count(self): return 4
    def configure_multiprocess(self, rank, n): xr.global_ordinal,xr.world_size = (lambda: rank),(lambda: n)
plugins.using_dynamic_plugins,plugins.default = (lambda: True),FourChips
def wait(core): time.sleep(60)
'''

TOOLS = '''
def rank(core): return core.rank

def error(fn, *args, seconds=10, **kwargs):
    "What `launch` raises: within seconds, with no process left, and so that the next call works"
    start = time.monotonic()
    try: res = AssertionError(f'no error, but {launch(fn, *args, **kwargs)}')
    except BaseException as e: res = e
    took = time.monotonic() - start
    assert took < seconds, f'{fn.__name__}: {took:.1f} s'
    assert not mp.active_children(), f'{fn.__name__}: {mp.active_children()}'
    assert launch(rank) == [0,1,2,3]
    return res

def check(e, exc, *texts):
    assert type(e) is exc and all(o in str(e) for o in texts), f'{type(e)} {e}, not {exc} {texts}'
'''

END = '''
assert not runtime_started() and not mp.active_children()
print('finished')
'''

CORES = dict(threads=THREADS, processes=PROCESSES)
both = pytest.mark.parametrize('cores', CORES)

def run(cores, code, **kwargs):
    __tracebackhide__ = True
    res = run_code(START + CORES[cores] + TOOLS + dedent(code) + END, **kwargs)
    assert res.rstrip().endswith('finished')
    return res

@both
def test_results_and_events(cores):
    "Results in the order of the cores, arguments as they are, events while the cores run, in the order of sending"
    run(cores, '''
    torch.ones(1, requires_grad=True).sum().backward()   # autograd's threads, once started on the CPU, don't work with XLA
    lock = threading.Lock()   # can't be pickled
    def fn(core, a, *, b):
        for i in range(3): core.send('count', i, a)
        t = torch.ones(2, device=core.device, requires_grad=True)
        (t*3).sum().backward()
        core.send('ready')
        end = time.monotonic() + 20
        while not Path('answer').exists() and time.monotonic() < end: time.sleep(.01)
        time.sleep(.05*(4-core.rank))   # the last core is the first to end
        with lock: return core.rank, core.world_size, core.is_master, core.shares_process, core.device.type, a+b, t.grad.tolist(), Path('answer').exists()
    events = []
    def on_event(*o):
        events.append(o)
        if [o[1] for o in events].count('ready') == 4: Path('answer').touch()
    res = launch(fn, 1, b=2, on_event=on_event)
    assert res == [(i, 4, i==0, threads, 'xla', 3, [3.,3.], True) for i in range(4)], res
    for i in range(4): assert [o for o in events if o[0]==i] == [*((i, 'count', j, 1) for j in range(3)), (i, 'ready')], events
    # a process that ends at once could be given a second core
    pids = launch(lambda core: time.sleep(.5) or os.getpid())
    assert len(set(pids)) == (1 if threads else 4) and os.getpid() not in pids
    ''')

def test_collectives():
    "The control for all else: 2, 4 and 8 cores reduce and gather, 50 times, each with the same program"
    run('threads', '''
    emulate_cores(8)
    def fn(core):
        res = []
        for i in range(50):
            t = torch.tensor([core.rank+1., i]).to(core.device)
            s,g = all_reduce(t),all_gather(t[:1])
            sync()
            res.append((s.tolist(), g.tolist()))
            rendezvous()
        return res
    for n in (2, 4, 8):
        ranks = [float(i+1) for i in range(n)]
        assert launch(fn, num_cores=n) == [[([sum(ranks), float(n*i)], ranks) for i in range(50)]]*n, n
    ''')

@both
def test_errors(cores):
    "The first error of any core ends all of them; it has its own type, names the core, and carries that core's traceback"
    run(cores, '''
    class Mine(Exception): pass
    class Odd(Exception):
        def __init__(self, a, b): super().__init__(f'{a}{b}')
    class Locked(Exception):
        def __init__(self): super().__init__('locked'); self.lock = threading.Lock()
    def raises(core, make):
        if core.rank == 2: raise make()
        wait(core)
    def at_rank_2(make, *expected):
        e = error(raises, make)
        check(e, *expected)
        assert 'core 2 of 4: ' in str(e) and type(e.__cause__) is CoreTraceback and 'raise make()' in str(e.__cause__), e.__cause__

    at_rank_2(lambda: Mine('boom-7'), Mine, 'boom-7')
    at_rank_2(lambda: ValueError('boom-7', 3), ValueError, 'boom-7')
    at_rank_2(AssertionError, AssertionError, 'AssertionError')
    # what can't be sent or built again, and what would end the caller's own program
    at_rank_2(Locked, RuntimeError, 'Locked: locked')
    at_rank_2(lambda: Odd(1, 2), RuntimeError, 'Odd: 12')
    at_rank_2(lambda: SystemExit(4), RuntimeError, 'SystemExit: 4')
    at_rank_2(KeyboardInterrupt, RuntimeError, 'KeyboardInterrupt')

    def everywhere(core): raise Mine(f'boom-{core.rank}')
    e = error(everywhere)
    check(e, Mine)
    i = re.fullmatch(r'core (\\d) of 4: boom-(\\d)', str(e))
    assert i[1] == i[2], e

    def late(core):
        for i in range(20): core.send('at', i)
        if core.rank == 2: raise Mine('late')
        wait(core)
    events = []
    check(error(late, on_event=lambda *o: events.append(o)), Mine, 'core 2 of 4: late')
    assert [o for o in events if o[0]==2] == [(2, 'at', i) for i in range(20)]   # nothing that was sent before the error is lost

    def odd_result(core): return threading.Lock() if core.rank == 2 else wait(core)
    check(error(odd_result), TypeError, 'core 2 of 4', 'pickle')

    def event(core): core.send('hello'); wait(core)
    def bad_handler(*args): raise Mine('in the caller')
    e = error(event, on_event=bad_handler)
    check(e, Mine)
    assert str(e) == 'in the caller'
    ''')

@both
def test_deaths(cores):
    "A core's process that ends without a word: the caller says which and how, even if children of the core live on"
    run(cores, '''
    def named(e):
        "The cores that the message names"
        return [int(o) for o in re.match(r'core ([\\d, ]+) of 4: ', str(e))[1].split(', ')]
    def killed(core):
        if core.rank == 2: os.kill(os.getpid(), signal.SIGKILL)
        wait(core)
    def exits(core):
        if core.rank == 2: os._exit(3)
        wait(core)
    for i in range(5):   # the end of a process is seen in several ways, at different times
        for fn,how in (killed, 'killed by signal 9 (SIGKILL)'), (exits, 'exit code 3'):
            e = error(fn)
            check(e, RuntimeError, how)
            assert ('memory' in str(e)) == (fn is killed)
            assert named(e) == [2] or threads and 2 in named(e), f'core 2: {e}'   # threads die together

    # what a core has started ends with it, and doesn't keep the caller waiting
    class Mine(Exception): pass
    def command(core):
        if core.rank == 2: subprocess.Popen(['sleep', '60']); raise Mine('with a command')
        wait(core)
    check(error(command), Mine)

    # a forked child shares all that the core has open, as the workers of a loader do
    def forked(core, end):
        if core.rank == 2:
            mp.get_context('fork').Process(target=time.sleep, args=(30,)).start()
            end()
        wait(core)
    def raises(): raise Mine('with a child')
    check(error(forked, raises), Mine)
    check(error(forked, lambda: os.kill(os.getpid(), signal.SIGKILL)), RuntimeError, 'core', '2', 'signal 9')
    ''')

@both
def test_interrupt(cores):
    "Ctrl-C or the stop button: KeyboardInterrupt in the caller, no word from the cores, and none is left"
    res = run(cores, '''
    def after(seconds, send):
        t = threading.Timer(seconds, send)
        t.start()
        return t
    def sleep(core): time.sleep(60)
    require_xla()   # not while torch_xla is being imported: Python can't take that up again
    # the stop button of a notebook
    t = after(1, lambda: os.kill(os.getpid(), signal.SIGINT))
    check(error(sleep), KeyboardInterrupt)
    # a terminal: to the whole group of processes
    t = after(.5, lambda: os.killpg(os.getpgrp(), signal.SIGINT))
    check(error(wait), KeyboardInterrupt)

    # while the cores are being started: before and after each of the first forks
    armed = set()
    def stop(when):
        if when in armed: armed.clear(); os.kill(os.getpid(), signal.SIGINT)
    os.register_at_fork(before=lambda: stop('before'), after_in_parent=lambda: stop('after'))
    for when in 'before', 'after', 'before', 'after':
        armed.add(when)
        e = error(sleep)
        check(e, KeyboardInterrupt)
        assert not armed
    ''')
    assert 'Traceback' not in res, res

@both
def test_caller_killed(cores):
    "Cores whose caller is gone end by themselves"
    run(cores, '''
    def fn(core):
        os.write(1, f'{os.getpid()} '.encode())
        core.send('started')
        wait(core)
    if sys.argv[1:]:
        n = []
        def on_event(*args):
            n.append(args)
            if len(n) < 4: return
            os.write(1, f'killed at {time.time()}'.encode())
            os.kill(os.getpid(), signal.SIGKILL)
        launch(fn, on_event=on_event)
    p = subprocess.Popen([sys.executable, __file__, 'as the caller'], stdout=subprocess.PIPE, text=True)
    text,_ = p.communicate(timeout=60)   # until the pipe is closed, by the end of the last core
    pids,_,died = text.partition('killed at ')
    assert p.returncode == -signal.SIGKILL and len(set(pids.split())) == (1 if threads else 4), text
    assert time.time()-float(died) < 5
    ''', timeout=90)

@both
def test_leaves_nothing(cores, tmp_path):
    "Environment, working directory, temporary files, open files and threads are as before, after success and after faults"
    # the path of a socket is limited to 107 bytes; that of a temporary folder isn't
    folder = tmp_path/('d'*100) if cores == 'threads' else tmp_path
    folder.mkdir(exist_ok=True)
    run(cores, '''
    require_xla()   # importing torch_xla sets variables of its own
    def state(): return dict(os.environ), os.getcwd(), os.listdir(), os.listdir(tempfile.gettempdir()), sorted(os.listdir('/proc/self/fd')), threading.active_count(), signal.getsignal(signal.SIGINT)
    def unchanged(what):
        gc.collect()   # an exception holds on to all that the call had open
        for a,b in zip(before, state()): assert a == b, f'{what}: {a} -> {b}'
    before = state()
    launch(rank)
    unchanged('success')
    def raises(core):
        if core.rank == 1: raise ValueError('boom')
        wait(core)
    check(error(raises), ValueError)
    unchanged('an error')
    def killed(core):
        if core.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        wait(core)
    check(error(killed), RuntimeError)
    unchanged('a killed core')
    def event(core): core.send('hello'); wait(core)
    def stop(*args): raise KeyboardInterrupt
    check(error(event, on_event=stop), KeyboardInterrupt)
    unchanged('the stop button')
    if threads:
        launch(rank, num_cores=3)
        unchanged('fewer cores')
    ''', env=dict(TMPDIR=folder))

@pytest.mark.parametrize('by', ('call', 'variable'))
def test_spawn(by):
    "Fresh processes, from a script with a main guard: what is sent is pickled, and the cores reduce all the same"
    env,call,cores = ({'FASTAI_XLA_CORES':4}, 'n = 2', 2) if by == 'variable' else ({}, 'n = 4; emulate_cores(4)', None)
    res = run_code(START + dedent(f'''
    class Mine(Exception): pass
    def fn(core, f, k=0):
        t = all_reduce(torch.tensor([core.rank+1.]).to(core.device))
        sync()
        core.send('sum', t.item())
        return f(t.item()), k
    def bad(core): raise Mine('boom-7')
    if __name__ == '__main__':
        {call}
        events = []
        res = launch(fn, lambda x: 2*x, k=3, start_method='spawn', num_cores={cores}, on_event=lambda *o: events.append(o))
        total = sum(range(1, n+1))
        assert res == [(2*total, 3)]*n and sorted(events) == [(i, 'sum', total) for i in range(n)], (res, events)
        try: launch(bad, start_method='spawn', num_cores={cores}); assert False
        except Mine as e: assert re.fullmatch(f'core . of {{n}}: boom-7', str(e)), e
        assert launch(fn, lambda x: x) == [(10., 0)]*4   # forked, after it
    ''') + """
    assert not runtime_started() and not mp.active_children()
    print('finished')
""", env=env)
    assert 'finished' in res

def test_num_cores():
    "Any number up to the emulated ones; what can't work is said before a process is started"
    run('threads', '''
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    def fn(core):
        t = all_reduce(torch.ones(1).to(core.device)); sync()
        return core.rank, core.world_size, t.item()
    for n,expected in (1,1), (3,3), (None,4), (4,4), (1,1), (None,4):
        assert launch(fn, num_cores=n) == [(i, expected, expected) for i in range(expected)], n
        assert forks
        forks.clear()
    assert n_cores() == 4 and os.environ['CPU_NUM_DEVICES'] == '4'
    def refused(*texts, **kwargs):
        try: launch(fn, **kwargs)
        except ValueError as e: assert all(o in str(e) for o in texts), e
        else: raise AssertionError(f'{kwargs} is accepted')
    for n in 0, -1, 5, 64, '4', True, 2., [2]: refused(f'num_cores={n!r}', 'from 1 to 4', 'FASTAI_XLA_CORES', num_cores=n)
    for o in 'forkserver', 'Fork', 1: refused(repr(o), "'fork' or 'spawn'", start_method=o)
    assert not forks
    ''')

@pytest.mark.parametrize('n', (None, 3))
def test_default_cores(n):
    """One core unless the environment asks for more; asking how many there are starts nothing.
    A process that holds the device can't start cores, and says which call took it"""
    res = run_code(START + dedent(f'''
    n = {n or 1}
    def fn(core): return core.rank
    assert n_cores() == n and not runtime_started()
    assert launch(fn) == list(range(n))
    def refused(exc, call, *texts):
        try: call()
        except exc as e: assert all(o in str(e) for o in texts), e
        else: raise AssertionError('no error')
    refused(ValueError, lambda: launch(fn, num_cores=8), 'num_cores=8', 'FASTAI_XLA_CORES', 'emulate_cores')
    assert not runtime_started()   # none of this takes the device

    xla_device('my own call')
    assert runtime_started()
    refused(RuntimeError, lambda: launch(fn), '`fn`', 'taken by my own call', 'Restart')
    refused(RuntimeError, lambda: emulate_cores(4), 'emulate_cores(4)', 'too late', 'taken by my own call')
    assert n_cores() == n and not mp.active_children()
    print('finished')
    '''), env={} if n is None else {'FASTAI_XLA_CORES':n})
    assert 'finished' in res
