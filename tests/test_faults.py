"Faults of every kind, on the master core, on another one and on all: the caller gets one exception that says where, and soon; nothing lives on; the next call works"
import os, sys
from textwrap import dedent
import pytest
import test_fit, test_launch
from helpers import ROOT, run_code, run_fresh

def matrix(*groups, **kwargs):
    "Run groups of cells of `fault_matrix` in one process; what it prints"
    __tracebackhide__ = True
    res = run_code(f'from fault_matrix import main; main(*{groups!r})', env={'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT/"tests"}'}, **kwargs)
    assert res.rstrip().endswith('finished')
    return res

@pytest.mark.parametrize('group', ('events', 'data', 'ends', 'inference'))
def test_matrix(group):
    """Each cell is a call with a fault, which `fault_matrix` checks: the exception's type, core, event and traceback, the time, the processes
    that are left, what is said of the learner, and that its weights are those of one that never failed. One learner goes through them all,
    so each cell also shows that the fault before it has broken nothing. Cases 05, 34, 36 and 57"""
    matrix(group, timeout=240)

@test_launch.both
def test_launched(cores):
    """At the level of `launch`, with cores as threads and as processes: the first error with its core, what that core was doing, and its traceback;
    a core that is killed (case 57); Ctrl-C while some cores work and others wait (case 34)"""
    test_launch.run(cores, '''
    class Boom(Exception): pass
    class Mute(Exception):
        def __str__(self): raise ValueError('no text')
    def fails(core, where, how):
        core.doing = f'working at {core.rank}'
        core.send('working')
        if core.rank in where: how()
        wait(core)
    def boom(): raise Boom('boom-7')
    def nothing(): raise Boom
    def mute(): raise Mute('boom-7')
    def missing(): open('boom-7')
    def both(): raise Boom('boom-7', [3])
    for where in [0], [2], [0,1,2,3]:
        for how,exc,*texts in (boom, Boom, 'boom-7'), (nothing, Boom, 'Boom'), (mute, RuntimeError, 'Mute'), (missing, FileNotFoundError, "No such file or directory: 'boom-7'"), (both, Boom, 'boom-7'):
            e = error(fails, where, how)
            assert type(e) is exc, (type(e), e)
            said = re.search(r'core (\\d) of 4: working at (\\d): ', str(e))
            assert said and said[1] == said[2] and int(said[1]) in where and all(o in str(e) for o in texts), e
            assert type(e.__cause__) is CoreTraceback and f'in {how.__name__}' in str(e.__cause__), e.__cause__
            assert how is not both or e.args[1] == [3]
        e = error(fails, where, lambda: os.kill(os.getpid(), signal.SIGKILL))
        check(e, RuntimeError, 'SIGKILL', 'memory')
        assert threads or int(re.match(r'core (\\d) of', str(e))[1]) in where, e
        seen = []
        def on_event(*args):
            seen.append(args)
            if len(seen) == 4: os.kill(os.getpid(), signal.SIGINT)
        check(error(fails, where, lambda: time.sleep(60), on_event=on_event), KeyboardInterrupt)
    # pressed on and on, until the caller has its KeyboardInterrupt
    for pause in .0005, .002, .01, .03:
        stop = threading.Event()
        def press():
            while not stop.wait(pause): os.kill(os.getpid(), signal.SIGINT)
        def on_event(*args):
            if not t.is_alive(): t.start()
        t,began = threading.Thread(target=press),time.monotonic()
        try:
            try:
                launch(fails, [], None, on_event=on_event)
                assert False
            finally: stop.set()
        except KeyboardInterrupt: stop.set()
        t.join()
        assert time.monotonic()-began < 10 and not mp.active_children()
        assert launch(rank) == [0,1,2,3]
    ''')

@pytest.mark.parametrize('by', ('learn.to_xla()', "a tensor on 'xla'"))
def test_device_is_taken(by):
    "A process that holds the device gets the same answer from all nine verbs, at once: which call took it, and what to do"
    test_fit.run(f'''
    by = {by!r}
    emulate_cores(2)
    learn = learner(16)
    if by == 'learn.to_xla()': learn.to_xla().detach_xla()   # given back, as far as the learner goes
    else: import torch_xla; torch.ones(1, device='xla')
    assert runtime_started()
    verbs = dict(fit=(1,), fit_one_cycle=(1,), fit_flat_cos=(1,), fit_sgdr=(1, 1), fine_tune=(1,), lr_find=(), get_preds=(), validate=(), tta=())
    assert set(verbs) == {{o[4:] for o in dir(learn) if o.startswith('xla_') and o not in ('xla_ctx', 'xla_report', 'xla_plan')}}
    start,out = vec(learn),io.StringIO()
    for verb,args in verbs.items():
        began = time.monotonic()
        try:
            with contextlib.redirect_stdout(out): getattr(learn, f'xla_{{verb}}')(*args)
        except RuntimeError as e: assert all(o in str(e) for o in (f'`learn.xla_{{verb}}`', f'taken by {{by}}', 'Restart', 'before `to_xla`')), e
        else: assert False, f'xla_{{verb}}: no error'
        assert time.monotonic()-began < 1 and not mp.active_children()
    assert not out.getvalue() and torch.equal(vec(learn), start)
    learn.fit(1)   # and all else goes on
    with learn.xla_ctx(): learn.fit(1)
    ''')

def test_what_cannot_travel():
    "With spawned cores, what pickle refuses is named before a process is started, and so is the way out"
    test_fit.run('''
    emulate_cores(2)
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    lock = threading.Lock()
    class Holds(Callback):
        def __init__(self): self.lock = lock
    class Net(nn.Linear):
        def __init__(self): super().__init__(64, 10); self.lock = lock
    class Data(list): pass
    bad = Data(items[:64]); bad.lock = lock
    def loss(p, t): return lock and F.cross_entropy(p, t)
    def metric(p, t): return lock and p.mean()
    dls = DataLoaders.from_dsets(bad, bad, bs=16, device='cpu', num_workers=0)
    fit,preds = (lambda l, **kw: l.xla_fit(1, **kw)),(lambda l, **kw: l.xla_get_preds(**kw))
    cases = {'the model': (dict(model=Net), fit, {}), 'the data': (dict(dls=dls), fit, {}), 'the loss function': (dict(loss_func=loss), fit, {}), 'the metrics': (dict(metrics=metric), fit, {}),
             'the callback Holds': (dict(cbs=Holds()), fit, {}), 'the learner': (dict(opt_func=lambda *a, **k: lock and SGD(*a, **k)), fit, {})}
    calls = [(dict(cbs=Holds()), fit), (dict(master_cbs=Holds()), fit), (dict(cbs=Holds()), preds), (dict(dl=dls.train), preds)]
    for name,kwargs,call,kw in [*((k, *v) for k,v in cases.items()), *(('an argument of the call', {}, call, kw) for kw,call in calls)]:
        learn = learner(16, **kwargs)
        try:
            with learn.no_logging(): call(learn, start_method='spawn', **kw)
        except TypeError as e: assert f"and {name} can't be pickled" in str(e) and "Use start_method='fork'" in str(e), (name, e)
        else: assert False, name
        assert not forks and learn.opt_func and {p.device.type for p in learn.model.parameters()} == {'cpu'}
    # the way out
    learn,ref = (learner(bs, model=Net, loss_func=loss, cbs=Holds()) for bs in (16, 32))
    for o in (learn, ref): o.metrics = [AvgMetric(lambda p,t: lock and p.mean())]
    with learn.no_logging(), ref.no_logging(): learn.xla_fit(1, start_method='fork'); ref.fit(1)
    same(learn, ref)

    from fastai_xla_extensions.launch import launch
    def fn(core, *args, **kwargs): pass
    for name,f,args,kw in ('the function', lambda core: lock, (), {}), ('argument 1', fn, (1, lock), {}), ('argument b', fn, (), dict(b=lock)):
        try: launch(f, *args, start_method='spawn', **kw)
        except TypeError as e: assert f"and {name} can't be pickled" in str(e) and 'fork' in str(e), e
        else: assert False, name
    untouched()
    ''')

def test_no_main_guard(tmp_path):
    """A script that starts spawned cores whenever it is imported: one line from the core and one error in the caller, both with the hint,
    and no more processes than one for the core"""
    script = tmp_path/'script.py'
    text = dedent('''
    import os
    open(f'{os.environ["RUNS"]}/{os.getpid()}', 'w').close()
    from fastai.basics import *
    from fastai.test_utils import synth_learner
    from fastai_xla_extensions.all import *
    emulate_cores(2)
    learn = synth_learner(n_trn=4)
    MAIN
    ''')
    for call in "xla_fit(1, start_method='spawn')", "xla_get_preds(start_method='spawn')":
        runs = tmp_path/call; runs.mkdir()
        script.write_text(text.replace('MAIN', f'learn.{call}'))
        with pytest.raises(AssertionError) as e: run_fresh([sys.executable, script], cwd=tmp_path, env={'PYTHONPATH': ROOT, 'RUNS': runs}, timeout=90)
        out = str(e.value).partition('--- output ---')[2]
        assert 'exit code 1\n' in str(e.value) and 'survive' not in str(e.value), e.value
        assert out.count("`if __name__ == '__main__':`") == 2 and out.count('Traceback') == 1, out
        assert out.rstrip().splitlines()[-1].startswith('RuntimeError: The cores could not be started'), out
        assert len(list(runs.iterdir())) == 2, out

def test_loader_workers():
    """Case 36: workers, persistent or not, end with the call, with the validation set and without; nothing piles up over five calls,
    and the results are those without workers"""
    test_fit.run('''
    emulate_cores(2)
    sys.path.insert(0, TESTS)
    from helpers import session_pids
    def state(): gc.collect(); return len(os.listdir('/proc/self/fd')), threading.active_count(), set(session_pids(os.getsid(0), b'-'))
    for persistent in (False, True):
        def with_workers(bs, num_workers):
            kw = dict(bs=bs, device='cpu', num_workers=num_workers, shuffle=(False, False), drop_last=(False, False))
            if num_workers: kw['persistent_workers'] = persistent
            return DataLoaders.from_dsets(items[:64], items[64:85], **kw)
        learn,ref = learner(8, dls=with_workers(8, 4)),learner(16, dls=with_workers(16, 0))
        states = []
        for i in range(5):
            with learn.no_logging(), ref.no_logging():
                if i % 2: p,q = learn.xla_get_preds(),ref.get_preds(); test_close(p[0], q[0], 1e-5); test_eq(p[1], q[1])
                else: learn.xla_fit(1 if i else 3); ref.fit(1 if i else 3)
            states.append(state())
        same(learn, ref, what=f'persistent_workers={persistent}')
        assert states == [states[0]]*5 and states[0][-1] == {os.getpid()}, states
    untouched()
    '''.replace('TESTS', repr(str(ROOT/'tests'))), timeout=240)

def test_saving_on_the_master_only():
    """Case 38: a callback that reads the loss, saves and exports on the master core alone, in a batch and at the end of an epoch.
    The files are whole, and training is what it is without it"""
    test_fit.run('''
    emulate_cores(4)
    class Saves(Callback):
        def __init__(self, folder): self.folder,self.seen = Path(folder),[]
        def _save(self, name):
            self.learn.save(self.folder/name)
            torch.save({k: v.cpu() for k,v in self.learn.model.state_dict().items()}, self.folder/f'{name}.pt')
            self.seen.append(float(self.learn.loss))
        def after_batch(self):
            if ordinal() == 0 and self.training and self.iter == 2: self._save(f'batch{self.epoch}')
        def after_epoch(self):
            if ordinal() == 0: self._save(f'epoch{self.epoch}'); self.learn.export(self.folder/f'epoch{self.epoch}.pkl')   # in a batch, fastai's own `export` takes the loss away
    folder = Path(tempfile.mkdtemp())
    def x(i): return X[i]
    def y(i): return Y[i]
    def make(bs):
        dsets = Datasets(range_of(200), [[x], [y]], splits=[range_of(160), list(range(160,200))])
        return learner(bs, dls=dsets.dataloaders(bs=bs, device='cpu', num_workers=0, drop_last=False))
    learn,plain,ref = make(8),make(8),make(32)
    saves = Saves(folder)
    with learn.no_logging(), plain.no_logging(), ref.no_logging(): learn.xla_fit(2, cbs=saves); plain.xla_fit(2); ref.fit(2)
    same(learn, plain, 0, 'with and without'); same(learn, ref)
    assert len(saves.seen) == 4 and all(np.isfinite(saves.seen)) and len(list(folder.rglob('*.p*'))) == 10, list(folder.iterdir())
    for name in 'batch0', 'epoch0', 'batch1', 'epoch1':
        a = make(8)
        a.load(folder/name)
        if 'epoch' in name:
            pkl = (folder/f'{name}.pkl').read_bytes()
            assert pkl.count(b'xla') == pkl.count(b'fastai_xla_extensions.core\\nordinal') == 1, pkl   # this callback's own
            assert torch.equal(vec(a), vec(load_learner(folder/f'{name}.pkl')))
        c = mlp(); c.load_state_dict(torch.load(folder/f'{name}.pt'))
        assert torch.equal(vec(a), vec(c)), name
        assert torch.equal(vec(a), vec(learn)) == (name == 'epoch1'), name
    shutil.rmtree(folder)
    untouched()
    ''')

def test_interrupted_kernel(tmp_path):
    "Case 34: the stop button of a notebook. The cell ends with a KeyboardInterrupt within 10 s, and the next cell trains; no process outlives the kernel"
    code = test_fit.START+dedent('''
    emulate_cores(2)
    learn,ref = learner(16),learner(32)
    class Slow(Callback):
        def before_epoch(self): time.sleep(1)
    ''')
    check = dedent('''
    assert not mp.active_children()
    with ref.no_logging(): ref.fit(n := learn.epoch+1)
    assert n >= 1 and diff(learn, ref) < 1e-5
    with learn.no_logging(), ref.no_logging(): learn.xla_fit(1); ref.fit(1)
    assert diff(learn, ref) < 1e-5
    untouched()
    print('checked')
    ''')
    res = run_code(f'''
    import sys, time
    from jupyter_client.manager import start_new_kernel
    km,kc = start_new_kernel(kernel_name='python3')
    def cell(code, stop=None):
        "What a cell prints, its error, and the seconds from the interrupt to its end; it is interrupted once it has printed `stop`"
        mid,text,err,at = kc.execute(code),'',None,None
        while True:
            msg = kc.get_iopub_msg(timeout=120)
            if msg['parent_header'].get('msg_id') != mid: continue
            kind,c = msg['msg_type'],msg['content']
            if kind == 'stream': text += c['text']
            elif kind == 'error': err = c['ename'],c['evalue'],c['traceback']
            elif kind == 'status' and c['execution_state'] == 'idle': return text,err,None if at is None else time.monotonic()-at
            if stop and at is None and stop in text: km.interrupt_kernel(); at = time.monotonic()
    try:
        res = cell({code!r})
        assert res[1] is None, res
        text,err,took = cell('learn.xla_fit(50, cbs=Slow())', stop='\\n1 ')
        assert err[0] == 'KeyboardInterrupt' and took < 10 and 'as of the end of epoch' in text, (text, err, took)
        res = cell({check!r})
        assert res[1] is None and res[0].rstrip().endswith('checked'), res
    finally: kc.stop_channels(); km.shutdown_kernel(now=True)
    print('finished')
    ''', env={'IPYTHONDIR': tmp_path}, timeout=150)
    assert res.rstrip().endswith('finished')
