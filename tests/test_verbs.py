"fastai's verbs on all cores, its callbacks on them, and what is left when a fit is cut short"
from helpers import run_code
from test_exact import DATA
from test_loaders import SETUP

TOOLS = DATA + '''
import tempfile, multiprocessing, signal, threading, time
from fastai_xla_extensions.core import ordinal, runtime_started
os.chdir(tempfile.mkdtemp())
def learner(bs, n_train=64, n_valid=37, drop=False, opt_func=partial(SGD, mom=.9), **kwargs):
    set_seed(7)
    split = lambda m: L(params(m[0]), params(m[2]))
    l = Learner(dls(bs, n_train, n_valid, drop), mlp(), loss_func=CrossEntropyLossFlat(), opt_func=opt_func, lr=.1, metrics=[accuracy, F1Score()], splitter=split, path='.', **kwargs)
    l.remove_cb(ProgressCallback); l.dls.train.rng.seed(1)
    return l
def both(verb, *args, cbs=None, mk=learner, **kwargs):
    "`xla_<verb>` on n cores with bs 4, and fastai's own with 4*n"
    l,r = mk(4),mk(4*n)
    with l.no_logging(), r.no_logging():
        res = getattr(l, f'xla_{verb}')(*args, **kwargs, **(dict(cbs=cbs()) if cbs else {})),getattr(r, verb)(*args, **kwargs, **(dict(cbs=cbs()) if cbs else {}))
    return l,r,res
def near(a, b, eps=1e-4): test_close(a, b, eps*max([1., *(abs(float(o)) for o in b if o is not None)]))   # of the largest: some of these fits go up to losses of 80
def equal(l, r, tol=1e-5):
    assert rel(l, r) < tol, rel(l, r)
    a,b = l.recorder,r.recorder
    test_eq(a.metric_names, b.metric_names); test_close(a.lrs, b.lrs, 1e-7); test_eq(a.iters, b.iters)
    assert len(a.losses) == len(b.losses) and len(a.values) == len(b.values)
    near(a.losses, b.losses); near([o for v in a.values for o in v], [o for v in b.values for o in v])
    near(l.final_record, r.final_record)
    for p,q in zip(l.model.parameters(), r.model.parameters()): test_eq(p.requires_grad, q.requires_grad)
    test_eq(l.opt.frozen_idx, r.opt.frozen_idx)
    for h,k in zip(l.opt.hypers, r.opt.hypers): test_close(list(h.values()), list(k.values()), 1e-7)
    for p,q in zip(l.model.parameters(), r.model.parameters()):
        if 'grad_avg' in r.opt.state[q]: test_close(l.opt.state[p]['grad_avg'], r.opt.state[q]['grad_avg'], 1e-4)
'''
END = '''
assert not runtime_started() and not multiprocessing.active_children()
print('finished')
'''
def run(code, n=4, **kw): assert run_code(SETUP.replace('N;', f'{n};', 1) + TOOLS + code + END, timeout=280, **kw).rstrip().endswith('finished')

def test_training_verbs():
    "Weights, schedules per step and group, history, optimizer: fastai's own with the large batch (case 41)"
    run('''
for verb,args,kw in [('fit_one_cycle', (2, slice(1e-3,.1)), dict(pct_start=.4)), ('fit_flat_cos', (2, .1), {}), ('fit_sgdr', (2, 1), dict(lr_max=.1)), ('fine_tune', (1,), dict(base_lr=.05)), ('fit', (1, .05), dict(wd=.1))]:
    l,r,_ = both(verb, *args, **kw)
    equal(l, r)
    if verb != 'fit': test_close([o for k in ('lr','mom') if k in r.recorder.hps for o in l.recorder.hps[k]], [o for k in ('lr','mom') if k in r.recorder.hps for o in r.recorder.hps[k]], 1e-6)
    test_close(l.validate(), r.validate(), 1e-4)
''')

def test_inference_verbs():
    "Predictions of any loader, complete and in order; the learner stays as it is (cases 02, 04, 64)"
    run('''
l = learner(4)
with l.no_logging(): l.xla_fit(1)
keep = torch.cat([p.detach().flatten() for p in l.model.parameters()]),len(l.recorder.lrs),[type(c) for c in l.cbs],l.dls.train.rng.getstate()
set_seed(3); ids = torch.arange(37)
d = DataLoaders(DataLoader(list(zip(X[:37], ids%2)), bs=4, shuffle=True, drop_last=True), DataLoader(list(zip(X[:1], ids%2)), bs=4), device='cpu')
with l.no_logging():
    for dl in (d.train, d.valid, d.train.new(shuffle=False), TfmdDL(list(zip(X[:8], ids%2)), bs=4, num_workers=0)):
        for kw in ({}, dict(with_input=True, with_decoded=True, with_loss=True)):
            a,b = l.xla_get_preds(dl=dl, **kw),l.get_preds(dl=dl, **kw)
            for u,v in zip(a, b): test_close(u, v, 1e-5); test_eq(type(u), type(v))
            test_eq(len(a[0]), len(dl.dataset))
    x,p,t = l.xla_get_preds(dl=d.train, with_input=True); test_eq(x, X[:37]); test_eq(t, ids%2)   # shuffled and drop_last: still all, in the order of the data set
    test_eq(l.xla_get_preds(dl=DataLoader([(x,) for x in X[:9]], bs=4))[1], l.get_preds(dl=DataLoader([(x,) for x in X[:9]], bs=4))[1])
    where = Path(tempfile.mkdtemp()); l.xla_get_preds(save_preds=where)
    test_close(torch.cat([torch.load(where/str(i)) for i in range(10)]), l.get_preds(act=noop)[0], 1e-5)
    test_close(l.xla_validate(), l.validate(), 1e-4); l.recorder.lrs = [0]*keep[1]
test_eq((torch.cat([p.detach().flatten() for p in l.model.parameters()]), [type(c) for c in l.cbs]), (keep[0], keep[2]))
from fastai.interpret import ClassificationInterpretation
test_eq(len(l.get_preds(1)[0]), 37); l.predict if hasattr(l.dls, 'test_dl') else None

# the finder stops at the same step on all cores, also when their losses differ much
for i in range(3):
    l,r,(a,b) = both('lr_find', start_lr=1e-6, end_lr=1e5, num_it=60, show_plot=False, suggest_funcs=(valley, minimum, steep), mk=lambda bs: learner(bs, drop=True))
    test_eq(a._fields, b._fields); test_close(a, b, 1e-3*max(map(abs, b)))
    assert l.opt is None and not list(Path('models').glob('tmp*'))
with l.no_logging(): test_eq(type(l.xla_lr_find(num_it=10, stop_div=False, suggest_funcs=None, show_plot=False)), type(None))
''')

def test_callbacks():
    "Decisions are taken from the values of all cores, counts are of all cores, loggers write once (cases 20, 21, 40)"
    run('''
from fastai.callback.tracker import *
from fastai.callback.training import *
for name,cbs,args in [('accumulation', lambda: [GradientAccumulation(32), GradientClip(.2)], (2,.1)), ('ragged accumulation', lambda: GradientAccumulation(24), (2,.1)),
                      ('early stopping', lambda: EarlyStoppingCallback(patience=1, min_delta=.2), (8,.1)), ('plateau', lambda: ReduceLROnPlateau(patience=1, min_delta=.5), (5,.1)),
                      ('save', lambda: SaveModelCallback(monitor='f1_score', fname='best'), (4,.5)), ('save every', lambda: SaveModelCallback(every_epoch=True, with_opt=True), (2,.1))]:
    l,r,_ = both('fit', *args, cbs=cbs, mk=partial(learner, n_train=70))
    print(name, rel(l, r), len(l.recorder.values))
    equal(l, r)
# what a callback has gathered is in the caller's own object
l = learner(4); save,early = SaveModelCallback(fname='b2'),EarlyStoppingCallback(patience=9)
with l.no_logging(): l.xla_fit(2, cbs=[save, early])
test_close(save.best, min(v[1] for v in l.recorder.values), 1e-5); test_eq(early.wait, 0 if early.best == l.recorder.values[-1][1] else 1)
# CSVLogger: one header, a row per epoch, then two more
l = learner(4, cbs=CSVLogger(fname='h.csv'))
with l.no_logging(): l.xla_fit(3)
df = l.csv_logger.read_log(); test_eq(len(df), 3); test_close(df.valid_loss.tolist(), [v[1] for v in l.recorder.values], 1e-5)
l.csv_logger.append = True
with l.no_logging(): l.xla_fit(2)
test_eq(len(Path('h.csv').read_text().splitlines()), 1+3+1+2)
# one sample that isn't finite stops all cores at the same step
bad = X.clone(); bad[20,0] = float('nan')
l = learner(4); l.dls = dls(4, x=bad, shuffle=False)
with l.no_logging(): l.xla_fit(3, cbs=TerminateOnNaNCallback())
test_eq(len(l.recorder.lrs), 1)
# master callbacks run on one core
class Where(Callback):
    def before_fit(self): Path(f'{self.tag}{ordinal()}').touch()
a,b,c = Where(),Where(),Where()
for cb,tag in ((a,'all'), (b,'master'), (c,'added')): cb.tag = tag
l = learner(4).add_master_cbs(c)
with l.no_logging(): l.xla_fit(1, cbs=a, master_cbs=b)
test_eq(sorted(p.name for p in Path('.').iterdir() if p.name[:-1] in ('all','master','added')), ['added0','all0','all1','all2','all3','master0'])
# bfloat16: a fastai MixedPrecision is replaced, the parameters stay float32
for mk in (lambda l: l.to_xla_bf16(), lambda l: l.to_fp16(), lambda l: l.to_bf16()):
    l,r = mk(learner(4)),learner(16)
    with l.no_logging(), r.no_logging(): l.xla_fit(3); r.fit(3)
    assert 1e-5 < rel(l, r) < .05 and {p.dtype for p in l.model.parameters()} == {torch.float32}, rel(l, r)
    test_close(l.recorder.values[-1][1], r.recorder.values[-1][1], .02)
    assert hasattr(l, 'mixed_precision') and not hasattr(l.to_fp32(), 'mixed_precision')
# MixUp and CutMix: each core mixes its own part, with one program
set_seed(1); imgs = TensorImage(torch.rand(64,1,6,6)); y = (imgs[:,0,:3].mean((1,2)) > imgs[:,0,3:].mean((1,2))).long()
def image_learner(bs, cb):
    d = DataLoaders(TfmdDL(list(zip(imgs, y)), bs=bs, shuffle=True, num_workers=0), TfmdDL(list(zip(imgs, y)), bs=bs, num_workers=0), device='cpu')
    return Learner(d, nn.Sequential(nn.Flatten(), nn.Linear(36,2)), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.5, cbs=cb)
from fastai.callback.mixup import *
for cb in (MixUp, CutMix):
    l = image_learner(4, cb()); l.remove_cb(ProgressCallback)
    with l.no_logging(): l.xla_fit(6)
    assert l.recorder.values[-1][1] < l.recorder.values[0][1], l.recorder.values
    test_eq([type(c).__name__ for c in l.cbs if isinstance(c, MixHandler)], [cb.__name__])
''')

def test_cut_short():
    "An error or a stop leaves the learner as of the last finished epoch, and says so; all is usable afterwards"
    run('''
class Boom(Callback):
    def __init__(self, event, core=2, epoch=1): self.event,self.core,self.at = event,core,epoch
    def _maybe(self, event):
        if event == self.event and self.epoch == self.at and ordinal() == self.core: raise ValueError('boom-7')
for e in ('before_fit', 'before_batch', 'after_batch', 'after_epoch', 'after_validate'): setattr(Boom, e, (lambda e: lambda self: self._maybe(e))(e))
import io, contextlib
for event,epoch in [('before_fit', 0), ('after_batch', 1), ('after_validate', 1), ('before_batch', 2)]:
    l,r = learner(4),learner(16)
    if epoch:
        with r.no_logging(): r.fit(epoch)
    out,start = io.StringIO(),time.monotonic()
    try:
        with contextlib.redirect_stdout(out): l.xla_fit(4, cbs=Boom(event, epoch=epoch))
    except ValueError as e: assert 'core 2 of 4' in str(e) and 'boom-7' in str(e) and event in str(e), e
    else: assert False
    assert time.monotonic()-start < 30
    assert ('as it was before the call' if not epoch else f'as of the end of epoch {epoch-1}') in out.getvalue(), out.getvalue()
    assert rel(l, r) < 1e-5
    with l.no_logging(): l.xla_fit(1)
    if epoch:
        with r.no_logging(): r.fit(1)
        assert rel(l, r) < 1e-5
    l.validate()
# the stop button, once epochs are done
class Slow(Callback):
    def before_batch(self): time.sleep(.1)
l = learner(4); seen = []
l.logger = lambda row: (seen.append(row), os.kill(os.getpid(), signal.SIGINT)) if len(seen) == 1 else seen.append(row)
start = time.monotonic()
try: l.xla_fit(50, cbs=Slow())
except KeyboardInterrupt: pass
else: assert False
assert time.monotonic()-start < 20 and len(seen) >= 2
l.logger = noop; l.xla_fit(1)
''')

def test_tta_and_spawn():
    "Test time augmentation with a transform that isn't random; a fit on spawned cores, and what can't be sent to them"
    run('''
class Shift(Transform):
    split_idx = 0   # in training, and in the augmented passes
    def encodes(self, x:TensorImage): return x+.25
dsets = Datasets(range(61), [[lambda i: TensorImage(X[i].view(1,1,6))], [lambda i: TensorCategory(Y[i])]], splits=[list(range(40)), list(range(40,61))])
d = dsets.dataloaders(bs=4, after_item=[Shift()], num_workers=0, device='cpu')
l = Learner(d, nn.Sequential(nn.Flatten(), nn.Linear(6,2)), loss_func=CrossEntropyLossFlat(), lr=.1); l.remove_cb(ProgressCallback)
with l.no_logging():
    l.xla_fit(1)
    for kw in ({}, dict(n=2, beta=None), dict(use_max=True)):
        a,b = l.xla_tta(**kw),l.tta(**kw)
        test_close(a[0], b[0], 1e-5); test_eq(a[1], b[1]); test_eq(len(a[1]), 21)
    holds = Callback(); holds.lock = threading.Lock()
    try: l.xla_fit(1, start_method='spawn', cbs=holds)
    except TypeError as e: assert "start_method='spawn'" in str(e) and 'pickle' in str(e), e
    else: assert False
''')
    assert run_code('''
from fastai.basics import *
from fastai.test_utils import synth_learner
from fastai_xla_extensions.all import *
def main():
    emulate_cores(2)
    a,b = [(set_seed(1), synth_learner(n_trn=4))[1] for _ in range(2)]
    b.model.load_state_dict(a.model.state_dict()); b.dls = a.dls
    state = a.dls.train.rng.getstate()
    with a.no_logging(): a.xla_fit(1, start_method='spawn')
    a.dls.train.rng.setstate(state)
    with b.no_logging(): b.xla_fit(1)
    for p,q in zip(a.model.parameters(), b.model.parameters()): test_close(p.detach(), q.detach(), 1e-6)
    print('finished')
if __name__ == '__main__': main()
''').rstrip().endswith('finished')
