"""Faults of every kind on the cores of one caller, one call after the other: what the caller gets, how soon, and what is left.

A script for a process of its own, given the groups of cells to run: `test_faults.py` and `benchmarks/faults.py` start it."""
import contextlib, io, json, multiprocessing, os, re, shutil, signal, sys, tempfile, threading, time, warnings
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastai.data.load import DataLoader
from fastai_xla_extensions.all import *
from fastai_xla_extensions.core import ordinal, require_xla, runtime_started
from fastai_xla_extensions.launch import CoreTraceback
from helpers import session_pids

N,BS = 4,4   # cores, and the batch size of each
WHERE = {'master core': [0], 'another core': [2], 'all cores': [0,1,2,3]}
EPOCH = 1    # when it happens; before_fit, predictions and the learning rate finder know no epochs

class Boom(Exception): pass
class Locked(Exception):
    "Can't be pickled"
    def __init__(self, msg): super().__init__(msg); self.lock = threading.Lock()
class Odd(Exception):
    "Can't be built again from its `args`"
    def __init__(self, a, b): super().__init__(f'{a}-{b}')
class Mute(Exception):
    "Has no text"
    def __str__(self): raise ValueError('no text')

def raises(make): raise make()
HOW = dict(
    boom=lambda: raises(lambda: Boom('boom-7')), no_args=lambda: raises(Boom), key=lambda: {}['boom-7'], file=lambda: open('boom-7'), locked=lambda: raises(lambda: Locked('boom-7')),
    odd=lambda: raises(lambda: Odd('boom', 7)), mute=lambda: raises(lambda: Mute('boom-7')), exits=lambda: sys.exit('boom-7'), cancel=lambda: raises(CancelFitException),
    kill=lambda: os.kill(os.getpid(), signal.SIGKILL), wait=lambda: time.sleep(60))

# The cores and their loader workers inherit these
folder,plan,now = Path(tempfile.mkdtemp()),{},{}

def maybe(kind, i=None):
    "The fault, if the call at hand is to have one of this `kind`, and on this core: that of sample `i`, since nothing is shuffled"
    core = ordinal() if i is None else i % N
    if plan.get('kind') == kind and core in plan['cores'] and now.get(core, EPOCH) == EPOCH: happen()

def happen():
    (folder/f'{time.time()}').touch()
    HOW[plan['how']]()

class Faults(Callback):
    "In the second batch"
    def before_fit(self): maybe('before_fit')
    def before_epoch(self):
        now[ordinal()] = self.epoch if plan['verb'] == 'fit' else EPOCH   # validation has the epoch of the last fit
        maybe('before_epoch')
    def before_batch(self): self._second('before_batch')
    def after_batch(self): self._second('after_batch')
    def _second(self, kind):
        if self.iter == 1: maybe(kind)
    def after_validate(self): maybe('after_validate')
    def after_epoch(self): maybe('after_epoch')

class SlowMaster(Callback):
    "The other cores are in the next epoch before the caller has heard of the end of this one"
    order,master_only = 99,True
    def after_epoch(self): time.sleep(.5)

class Net(nn.Linear):
    "The caller's one may be interrupted while it is given the weights of the last finished epoch"
    def load_state_dict(self, *args, **kwargs):
        super().load_state_dict(*args, **kwargs)
        if plan.get('again'): os.kill(os.getpid(), signal.SIGINT)

set_seed(0)
X = torch.randn(101, 6)
X[:,5] = torch.arange(101)/100   # which sample it is
Y = (X[:,0]*2 + X[:,1] + torch.randn(101)*.5 > 0).long()

class Items:
    def __len__(self): return 64
    def __getitem__(self, i):
        if i >= N*BS: maybe('dataset', i)   # the second batch
        return X[i],Y[i]

def collate(b):
    i = round(b[0][0][5].item()*100)
    if i >= N*BS: maybe('collate', i)
    return default_collate(b)

def failing_metric(preds, targs): maybe('metric'); return (preds.argmax(-1) == targs).float().mean()

def loaders(bs, num_workers=0, **kwargs):
    return DataLoaders(DataLoader(Items(), bs=bs, num_workers=num_workers, **kwargs), DataLoader(list(zip(X[64:], Y[64:])), bs=bs, num_workers=num_workers), device='cpu')

def learner(bs, **kwargs):
    set_seed(7)
    l = Learner(loaders(bs, **kwargs), Net(6, 2), loss_func=CrossEntropyLossFlat(), opt_func=partial(SGD, mom=.9), lr=.02, metrics=failing_metric)
    l.remove_cb(ProgressCallback)
    return l

def vec(l): return torch.cat([p.detach().flatten() for p in l.model.parameters()])
def rel(a, b): return ((vec(a)-vec(b)).norm()/vec(b).norm()).item()

class Cell:
    "One call with a fault. `exc` and `texts`: the exception that the caller gets"
    def __init__(self, kind, where, how='boom', exc=Boom, texts=('boom-7',), verb='fit', workers=0, what=None, interrupts=None, seconds=30):
        store_attr()
        self.name = what or {'kill': 'SIGKILL', 'wait': 'SIGINT of the caller, while cores wait'}.get(how, f'raise in {kind}')
        if verb != 'fit': self.name += f', {verb}'
        self.finished = kind != 'before_fit' and verb == 'fit'   # the epoch before the fault

CELLS = {}
# case 05: the other cores wait in a collective for the one that raises
EVENTS = 'before_fit','before_batch','after_batch','after_validate','after_epoch'
LOADING = 'loading batch 1 of training','epoch 1'
CELLS['events'] = [Cell(k, w, texts=('boom-7', f'event `{k}`', '`Faults`')) for k in EVENTS for w in WHERE] + [Cell('before_epoch', 'another core', texts=('boom-7', 'event `before_epoch`'), what='raise in before_epoch, the master core lags behind')]
CELLS['data'] = [
    *[Cell(k, w, texts=('boom-7', *LOADING)) for k in ('dataset','collate') for w in WHERE],
    *[Cell('metric', w, texts=('boom-7', 'event `after_batch`')) for w in WHERE],
    # case 36: a fault in a worker of the loader
    *[Cell('dataset', w, texts=('boom-7', *LOADING), workers=N, what='raise in a loader worker') for w in WHERE],
    Cell('dataset', 'another core', 'kill', RuntimeError, ('worker', 'exited unexpectedly', 'loading batch '), workers=N, what='SIGKILL of a loader worker'),
    Cell('dataset', 'another core', 'file', FileNotFoundError, ("No such file or directory: 'boom-7'", *LOADING), what='FileNotFoundError in dataset'),
    Cell('dataset', 'another core', 'no_args', Boom, LOADING, what='exception without arguments in dataset')]
HERE = 'event `after_batch`',
CELLS['ends'] = [
    Cell('after_batch', 'another core', 'no_args', Boom, HERE, what='exception without arguments'),
    Cell('after_batch', 'another core', 'key', KeyError, ('boom-7', *HERE), what='KeyError'),
    Cell('after_batch', 'another core', 'file', FileNotFoundError, ("No such file or directory: 'boom-7'", *HERE), what='FileNotFoundError'),
    Cell('after_batch', 'another core', 'locked', RuntimeError, ('Locked: ', 'boom-7', *HERE), what='exception that pickle refuses'),
    Cell('after_batch', 'another core', 'odd', RuntimeError, ('Odd: ', 'boom-7', *HERE), what='exception that can\'t be built again'),
    Cell('after_batch', 'another core', 'mute', RuntimeError, ('Mute', *HERE), what='exception without a text'),
    Cell('after_batch', 'another core', 'exits', RuntimeError, ('SystemExit: boom-7', *HERE), what='sys.exit'),
    Cell('before_batch', 'another core', 'cancel', RuntimeError, ('signal 6', 'on some cores only'), what='CancelFitException'),
    # case 57: the system kills a core. Cores are threads of one process here: all of them go
    Cell('after_batch', 'all cores', 'kill', RuntimeError, ('signal 9', 'SIGKILL', 'memory')),
    # case 34: Ctrl-C, also when pressed again and again, and before any core runs
    *[Cell('after_batch', w, 'wait', KeyboardInterrupt, (), interrupts=1, seconds=10) for w in WHERE],
    Cell('after_batch', 'another core', 'wait', KeyboardInterrupt, (), interrupts=100, seconds=10, what='SIGINT again and again'),
    Cell('before_fit', 'all cores', 'wait', KeyboardInterrupt, (), interrupts=1, seconds=10, what='SIGINT before the first batch')]
CELLS['inference'] = [
    Cell('dataset', 'another core', verb='get_preds', texts=('boom-7', 'loading batch 1')),
    Cell('before_batch', 'all cores', verb='get_preds', texts=('boom-7', 'event `before_batch`')),
    Cell('dataset', 'master core', 'kill', RuntimeError, ('worker', 'exited unexpectedly', 'loading batch '), verb='get_preds', workers=N, what='SIGKILL of a loader worker'),
    Cell('after_batch', 'another core', 'kill', RuntimeError, ('signal 9',), verb='validate'),
    Cell('after_batch', 'another core', verb='lr_find', texts=('boom-7', 'event `after_batch`')),
    Cell('collate', 'all cores', verb='lr_find', texts=('boom-7', 'loading batch 1')),
    Cell('after_batch', 'another core', 'wait', KeyboardInterrupt, (), verb='lr_find', interrupts=1, seconds=10)]

def others():
    "Processes of this session, and whatever multiprocessing knows of"
    end = time.monotonic()+1   # what is killed takes a moment to go
    while (res := {*session_pids(os.getsid(0), b'-'), *(p.pid for p in multiprocessing.active_children())} - {os.getpid()}) and time.monotonic() < end: time.sleep(.02)
    return res

def _interrupt(n, done):
    "Ctrl-C, as soon as the fault has come"
    while not any(folder.iterdir()) and not done.wait(.01): pass
    time.sleep(.2)
    for i in range(n):
        if done.wait(.005 if i else 0): return
        os.kill(os.getpid(), signal.SIGINT)

def call(learn, c):
    cbs = [] if c.verb == 'lr_find' else Faults()
    if c.verb == 'fit': learn.xla_fit(3, cbs=[cbs, SlowMaster()] if c.kind == 'before_epoch' else cbs)
    elif c.verb == 'get_preds': learn.xla_get_preds(0, cbs=cbs)
    elif c.verb == 'validate': learn.xla_validate(0, cbs=cbs)
    else:
        with learn.added_cbs(Faults()): learn.xla_lr_find(show_plot=False)

def run(c, learn, ref):
    "The row of a cell; an `AssertionError` if anything isn't as it must be"
    learn.dls = loaders(BS, c.workers, create_batch=collate)
    for o in folder.iterdir(): o.unlink()
    plan.update(kind=c.kind, cores=WHERE[c.where], how=c.how, verb=c.verb, again=(c.interrupts or 0) > 1); now.clear()
    out,done,err = io.StringIO(),threading.Event(),None
    t = threading.Thread(target=_interrupt, args=(c.interrupts, done)) if c.interrupts else None
    if t: t.start()
    start = time.time()
    try:
        try:
            with contextlib.redirect_stdout(out): call(learn, c)
        except BaseException as e: err = e
        done.set()
    except KeyboardInterrupt as e: err = err or e; done.set()   # one more, while the first is on its way
    end = time.time()
    if t: t.join()
    plan.clear(); now.clear()
    what,at = f'{c.name}, {c.where}: {type(err).__name__}: {err}',[float(o.name) for o in folder.iterdir()]
    assert at, f'it did not happen: {what}'
    took,after = end-start,end-min(at)
    assert took < c.seconds+20 and after < c.seconds, f'{took:.1f} s, {after:.1f} s after the fault: {what}'
    assert type(err) is c.exc, what
    how_it_ends = c.how in ('kill', 'cancel')   # without a word
    if c.exc is not KeyboardInterrupt:
        core = re.search(r"^\W?core ([\d, ]+) of 4: ", str(err))
        assert core and set(map(int, core[1].split(','))) <= set(WHERE[c.where]) or how_it_ends and not c.workers, what
        assert all(o in str(err) for o in c.texts), (c.texts, what)
        if not how_it_ends: assert type(err.__cause__) is CoreTraceback and 'in happen' in str(err.__cause__) and 'HOW' in str(err.__cause__), (what, err.__cause__)
    left = others()
    assert not left, f'{left} live on: {what}'
    if c.verb == 'fit':
        assert ('as of the end of epoch 0' if c.finished else 'as it was before the call') in out.getvalue(), (what, out.getvalue())
    if c.finished:
        with ref.no_logging(): old = vec(ref).clone(); ref.fit(1)
        assert (vec(ref)-old).norm() > 1e-3*old.norm()   # else this would show nothing
    assert rel(learn, ref) < 1e-5, f'weights differ by {rel(learn, ref)} after {what}'
    assert not runtime_started() and learn.logger is print and not hasattr(learn, 'faults')
    return dict(fault=c.name, where=c.where, gets=type(err).__name__, after=round(after, 1), took=round(took, 1))

def main(*groups):
    emulate_cores(N)
    require_xla()   # not while it is being imported: Python can't take that up again after Ctrl-C
    learn,ref = learner(BS),learner(BS*N)
    for c in (c for g in groups for c in CELLS[g]): print(f'row {json.dumps(run(c, learn, ref))}', flush=True)
    with learn.no_logging(), ref.no_logging(): learn.dls = loaders(BS); learn.xla_fit(2); ref.fit(2)
    assert rel(learn, ref) < 1e-5 and not others() and not runtime_started()
    shutil.rmtree(folder)
    print('finished')

if __name__ == '__main__': main(*sys.argv[1:])
