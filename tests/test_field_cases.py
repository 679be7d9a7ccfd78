"What users of other libraries have met, and every verb by both ways to start the cores; the numbers of cases are those of the survey"
import time
from textwrap import indent
import pytest
from helpers import run_code
from test_fit import START
from test_loaders import SETUP
from test_progress import notebook
from test_verbs import END, TOOLS, run

VERBS = '''
training = [('fit', (2, .05), dict(wd=.1)), ('fit_one_cycle', (2, slice(1e-3, .1)), dict(pct_start=.4)), ('fit_flat_cos', (2, .1), {}), ('fit_sgdr', (2, 1), dict(lr_max=.1)), ('fine_tune', (1,), dict(base_lr=.05))]
def train(cores, start_method, verb, args, kw, refs={}):
    l = learner(16//cores)
    with l.no_logging(): getattr(l, f'xla_{verb}')(*args, **kw, num_cores=cores, start_method=start_method)
    if verb not in refs:
        refs[verb] = learner(16)
        with refs[verb].no_logging(): getattr(refs[verb], verb)(*args, **kw)
    equal(l, refs[verb])
    assert not runtime_started() and not multiprocessing.active_children()
    return l
def flat(o): return torch.cat([p.detach().flatten() for p in o.model.parameters()])
class Shift(Transform):
    split_idx = 0
    def encodes(self, x:TensorImage): return x+.25
def imgs(bs):
    dsets = Datasets(range(61), [[lambda i: TensorImage(X[i].view(1,1,6))], [lambda i: TensorCategory(Y[i])]], splits=[list(range(40)), list(range(40,61))])
    set_seed(7)
    l = Learner(dsets.dataloaders(bs=bs, after_item=[Shift()], num_workers=0, device='cpu', drop_last=False), nn.Sequential(nn.Flatten(), nn.Linear(6,2)), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1, metrics=accuracy)
    l.remove_cb(ProgressCallback); l.dls.train.rng.seed(1)
    return l
def infer(cores, start_method):
    l,r = imgs(16//cores),imgs(16)
    opts = dict(num_cores=cores, start_method=start_method)
    with l.no_logging(), r.no_logging():
        for ds_idx in (0, 1): [test_close(a, b, 1e-5) for a,b in zip(l.xla_get_preds(ds_idx, with_loss=True, **opts), r.get_preds(ds_idx, with_loss=True), strict=True)]
        test_close(l.xla_validate(**opts), r.validate(), 1e-5)
        [test_close(a, b, 1e-5) for a,b in zip(l.xla_tta(n=2, **opts), r.tta(n=2), strict=True)]
        kw = dict(num_it=12, show_plot=False, suggest_funcs=(valley, steep))
        test_close(l.xla_lr_find(**kw, **opts), r.lr_find(**kw), 1e-6)
    assert not runtime_started() and not multiprocessing.active_children()
'''

@pytest.mark.parametrize('verbs', ['training', 'inference'])
def test_start_methods(verbs):
    "All nine verbs: the same by forked and by spawned cores, on four and on one, and as in fastai"
    code = SETUP.replace('N;', '4;', 1) + TOOLS + VERBS + ('''
for verb,args,kw in training:
    forked,spawned = [flat(train(4, o, verb, args, kw)) for o in ('fork', 'spawn')]
    assert torch.equal(forked, spawned), (verb, (forked-spawned).abs().max())
    train(1, 'fork', verb, args, kw)
train(1, 'spawn', *training[0])
''' if verbs == 'training' else '''
infer(4, 'fork'); infer(1, 'fork'); infer(2, 'spawn')
''') + END
    # a spawned core imports the script
    assert run_code("if __name__ == '__main__':\n" + indent(code, '    '), timeout=230).rstrip().endswith('finished')

def test_finder():
    """Case 04: the finder stops at the same step on all cores, whatever their losses; it gives fastai's suggestions and plot, and leaves no trace.
    Case 71: after the CPU has trained and searched"""
    run('''
import matplotlib; matplotlib.use('agg')
import matplotlib.pyplot as plt
def plot():
    "Everything that is drawn"
    ax = plt.gca()
    res = [l.get_xydata() for l in ax.lines] + [c.get_offsets() for c in ax.collections],[t.get_text() for t in ax.get_legend().get_texts()] if ax.get_legend() else [],(ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel())
    plt.close('all')
    return res
def state(o): return pickle.dumps((to_np(params_of(o)), o.opt and [{k: (v.tolist() if isinstance(v, Tensor) else v) for k,v in o.opt.state[p].items()} for p in o.model.parameters()], o.opt and o.opt.hypers,
                                   [getattr(o.recorder, k) for k in ('lrs', 'losses', 'values', 'iters')], o.final_record if o.opt else None, o.model.training, o.dls.train.rng.getstate(), [id(c) for c in o.cbs], sorted(vars(o))))
def params_of(o): return torch.cat([p.detach().flatten() for p in o.model.parameters()])
import pickle
trained = lambda bs: learner(bs, 110)   # ragged: 14 steps of 8; the plot leaves out the last five
def both_find(l, r, **kw):
    before,files = state(l) if hasattr(l, 'final_record') else None,sorted(map(str, Path('.').rglob('*')))
    keep = torch.get_rng_state(),np.random.get_state()[1].tolist()
    with l.no_logging(), r.no_logging():
        a = l.xla_lr_find(**kw); pa = plot() if kw.get('show_plot', True) else None
        after = state(l) if before else None
        assert sorted(map(str, Path('.').rglob('*'))) == files, 'files are left'
        assert before == after and (l.opt is None) == (before is None), 'the learner has changed'
        rng = r.dls.train.rng.getstate(); b = r.lr_find(**kw); r.dls.train.rng.setstate(rng); pb = plot() if kw.get('show_plot', True) else None
    test_eq(type(a).__name__, type(b).__name__)
    if a is not None: test_eq(a._fields, b._fields); test_close(a, b, 1e-6)
    if pa:
        test_eq(pa[1:], pb[1:]); test_eq(len(pa[0]), len(pb[0]))
        for u,v in zip(pa[0], pb[0]): test_eq(u.shape, v.shape); test_close(u[:,0], v[:,0], 1e-9); assert len(u) == 0 or np.allclose(u[:,1], v[:,1], rtol=1e-4, atol=1e-5), abs(u-v).max()
    return a,pa
# on the CPU first, with its own finder; then a fit on the cores
l,r = trained(2),trained(8)
for o in (l, r): o.recorder.before_fit()
both_find(l, r, num_it=10)
with l.no_logging(), r.no_logging(): l.dls.train.bs = 8; [(o.lr_find(num_it=8, show_plot=False), o.fit(1)) for o in (l, r)]; l.dls.train.bs = 2; l.xla_fit(2); r.fit(2)
equal(l, r)
threads = torch.autograd.is_multithreading_enabled()
# shorter than an epoch, whole epochs, and in the middle of one; with and without a stop; from high rates; per group; without suggestions
for kw in (dict(num_it=6), dict(num_it=28), dict(num_it=40, suggest_funcs=(valley, slide, minimum, steep)), dict(num_it=30, stop_div=False, end_lr=1e-2), dict(start_lr=1e-6, end_lr=1e5, num_it=60), dict(num_it=12, suggest_funcs=None)):
    _,p = both_find(l, r, **kw)
    assert len(p[0][0]) > 0 or kw['num_it'] == 6
with l.no_logging(), r.no_logging(): l.xla_fit(1); r.fit(1)
equal(l, r)
test_eq(torch.autograd.is_multithreading_enabled(), threads)

# targets that grow with the item's place in the step, so that the cores' losses are far apart; the stop is somewhere, and the same one
set_seed(2); xs = torch.randn(64, 2); ys = xs.sum(1, keepdim=True) + (10.**(torch.arange(64)%4))[:,None]
def grows(bs):
    set_seed(1)
    l = Learner(DataLoaders(DataLoader(list(zip(xs, ys)), bs=bs), DataLoader(list(zip(xs, ys)), bs=bs), device='cpu'), nn.Linear(2,1), loss_func=MSELossFlat(), opt_func=SGD)
    l.remove_cb(ProgressCallback); return l
for i in range(10):
    kw = dict(start_lr=1e-6, end_lr=1e2, num_it=80+i, show_plot=False)
    l,r = grows(4),grows(16)
    with l.no_logging(), r.no_logging(): a,b = l.xla_lr_find(**kw, suggest_funcs=(valley, minimum)),r.lr_find(**kw, suggest_funcs=(valley, minimum))
    test_close(a, b, 1e-6); assert 20 < len(r.recorder.lrs) < 80, 'it is to stop early'
assert not Path('models').exists() or not list(Path('models').glob('tmp*'))
''')

def test_calls_in_a_row():
    """Case 03: all kinds of calls in one process with looks in between, the runtime never started here. Case 71: the CPU first.
    Case 38: files written, and values read, by the master core alone. Case 60: what a batch is, on the core and in the line that says so"""
    run('''
import io, contextlib
from fastai_xla_extensions.core import world_size
def look(l):
    test_eq(n_cores(), 4)
    with contextlib.redirect_stdout(io.StringIO()): l.summary(); l.show_training_loop()
    for o in (l, l.dls, l.dls.train, l.model, l.opt, l.recorder, *l.cbs, XLAOptCallback()): repr(o)
    assert not runtime_started() and not multiprocessing.active_children()
l,r = learner(4),learner(16)
with l.no_logging(), r.no_logging():
    for o in (l, r): o.dls.train.bs = 16; o.lr_find(num_it=6, show_plot=False); o.fit(1)
    l.dls.train.bs = 4
    def both_do(verb, *args, **kw):
        res = getattr(l, f'xla_{verb}')(*args, **kw),getattr(r, verb)(*args, **kw)
        if verb not in ('lr_find', 'get_preds', 'validate'): equal(l, r)
        look(l)
        for o in (l, r): o.dls.train.rng.seed(5)   # looking draws, and so does fastai's finder
        return res
    both_do('lr_find', num_it=6, show_plot=False)
    both_do('fit', 1); both_do('fit_one_cycle', 1, 1e-3)
    a,b = both_do('get_preds'); test_close(a[0], b[0], 1e-5)
    both_do('fine_tune', 1, 1e-3); both_do('validate')
    both_do('lr_find', num_it=6, show_plot=False)
    both_do('fit_flat_cos', 1)

# on the master core alone, while the others go on
class Master(Callback):
    def __init__(self): self.read = []
    def after_batch(self):
        if ordinal() or not self.training or self.iter != 1: return
        self.read.append(float(self.learn.loss))
        self.learn.save(f'batch{self.epoch}'); torch.save(self.learn.model.state_dict(), f'state{self.epoch}.pth')
    def after_epoch(self):
        if ordinal() == 0: self.learn.save(f'epoch{self.epoch}'); self.learn.export(f'epoch{self.epoch}.pkl')
def files():
    "An exported learner needs data sets of fastai"
    l = learner(4)
    l.dls = Datasets(range(101), [[lambda i: X[i]], [lambda i: Y[i]]], splits=[list(range(64)), list(range(64, 101))]).dataloaders(bs=4, num_workers=0, device='cpu')
    l.dls.train.rng.seed(1)
    return l
for cbs in ('cbs', 'master_cbs'):
    l,plain,cb = files(),files(),Master()
    with l.no_logging(), plain.no_logging():
        start = [p.detach().clone() for p in l.model.parameters()]
        l.xla_fit(2, **{cbs: cb}); plain.xla_fit(2)
    assert all(torch.equal(p, q) for p,q in zip(l.model.parameters(), plain.model.parameters())), 'the callback changes the result'
    test_eq(l.recorder.values, plain.recorder.values)
    if cbs == 'cbs': assert len(cb.read) == 2 and all(0 < o < 2 for o in cb.read), cb.read
    for e in range(2):
        states = [torch.load(f, map_location='cpu', weights_only=False) for f in (f'models/batch{e}.pth', f'models/epoch{e}.pth', f'state{e}.pth')]
        states[:2] = [s['model'] for s in states[:2]]
        for s in states: test_eq({v.device.type for v in s.values()}, {'cpu'}); assert all(v.isfinite().all() for v in s.values())
        vals = [list(s.values()) for s in states]; test_eq(vals[0], vals[2]); assert not torch.equal(states[0]['0.weight'], states[1]['0.weight'])
        exported = load_learner(f'epoch{e}.pkl'); test_eq(list(exported.model.state_dict().values()), vals[1]); test_eq((exported.logger, sorted(c.name for c in exported.cbs)), (noop, sorted(c.name for c in [*l.cbs, cb])))
    test_close(vals[1], list(l.model.state_dict().values()), 1e-6)
    shutil.rmtree('models'); [o.unlink() for o in Path('.').glob('*.p*')]

# bs is that of a core
class Shapes(Callback):
    order = 60
    def before_fit(self): self.rows = []
    def after_batch(self): self.rows.append((self.training, len(self.learn.xb[0]), world_size()))
for bs,n_train,cores in (4,70,4), (20,64,4), (32,64,2), (4,64,1):
    l,cb,out = learner(bs, n_train),Shapes(),io.StringIO()
    with contextlib.redirect_stdout(out): l.xla_fit(1, cbs=cb, num_cores=cores)
    steps = -(-n_train//(bs*cores))
    test_eq(out.getvalue().splitlines()[0], f'{cores} core{"s"*(cores>1)} x bs {bs} = {bs*cores} a step, {steps} steps an epoch')
    rows = [o[1] for o in cb.rows if o[0]]
    test_eq(len(rows), steps); test_eq(set(rows[:n_train//(bs*cores)]), {bs} if n_train >= bs*cores else set()); test_eq({o[2] for o in cb.rows}, {cores})
    assert sum(rows) == n_train//(bs*cores)*bs + len(range(0, n_train%(bs*cores), cores)), rows   # of the last step: what falls to this core
    test_eq(len(l.recorder.losses), steps)
''')

def test_data():
    """Cases 19, 25, 26, 48, 49, 64, 67 and 68: what is left of them by the tests of loaders, metrics and losses"""
    run('''
import torch.utils.data as D
quiet = lambda l: (l.remove_cb(ProgressCallback) if hasattr(l, 'progress') else l, setattr(l, 'logger', noop), l)[-1]
class Echo(Module):
    def __init__(self, w=1.): self.w = nn.Parameter(torch.tensor(w))
    def forward(self, x): return x[:,:1]*self.w
ids = lambda k: [(tensor([float(i), 1.]), tensor([float(i)])) for i in range(k)]
def echo(train, valid, w=1., bs=4, **kw):
    return quiet(Learner(DataLoaders(DataLoader(train, bs=bs, **kw), DataLoader(valid, bs=bs), device='cpu'), Echo(w), loss_func=MSELossFlat(), opt_func=SGD, metrics=[mae]))

# case 19: the mean of the squares is known
for n_valid in (37, 40, 1):
    l = echo(ids(64), ids(n_valid), w=0.); l.xla_fit(1, 0.)
    test_close(l.recorder.values[0][1:], [sum(i*i for i in range(n_valid))/n_valid, (n_valid-1)/2], 1e-3)
    losses = [sum(i*i for i in range(s, s+16))/16 for s in range(0, 64, 16)]   # of each step, over all cores
    test_close(l.recorder.losses[0], losses[0], 1e-3)
    r = quiet(Learner(DataLoaders(DataLoader(ids(64), bs=16), DataLoader(ids(n_valid), bs=16), device='cpu'), Echo(0.), loss_func=MSELossFlat(), opt_func=SGD, metrics=[mae])); r.fit(1, 0.)
    test_close(l.recorder.losses, r.recorder.losses, 1e-2); test_close(l.recorder.values, r.recorder.values, 1e-2)

# case 25: a metric and a loss that hold tensors
class Held(Metric):
    def __init__(self): self.w = tensor([.2,.8])
    def reset(self): self.total = tensor(0.)
    def accumulate(self, learn): self.total = self.total + self.w.to(learn.pred.device)[learn.y].sum().cpu()
    @property
    def value(self): return self.total.item()
weight = tensor([.2,.8])
def held(bs): l = learner(bs); l.metrics = L(Held()); l.loss_func = CrossEntropyLossFlat(weight=weight); return quiet(l)
l,r = held(4),held(16); l.xla_fit(1); r.fit(1); equal(l, r)
a,b = l.xla_get_preds(with_loss=True),l.get_preds(with_loss=True)
for u,v in zip(a, b): test_close(u, v, 1e-5)
test_eq({weight.device.type, l.metrics[0].w.device.type, l.loss_func.func.weight.device.type}, {'cpu'})

# cases 26 and 48: sorted labels are mixed, validation stays in order; each core knows which it is
import tempfile
from fastai_xla_extensions.core import ordinal, world_size
class Who(Callback):
    shared = []   # of the class: the cores may be threads
    def before_fit(self): self.me,self.seen,self.learn.mine = ordinal(),[],ordinal()
    def before_batch(self):
        time.sleep(.001*((7*self.me+self.iter) % 5))
        assert (ordinal(), self.learn.mine, world_size()) == (self.me, self.me, 4)
    order = 50
    def after_batch(self): self.seen.append((self.epoch, self.training, self.learn.yb[0][:,0].int().tolist()))
    def after_fit(self): Path(f'who{self.me}').write_text(repr((self.seen, id(self.learn), id(self.learn.model), id(self.learn.opt), id(self))))
l = echo(ids(64), ids(40), shuffle=True); l.xla_fit(3, 1e-9, cbs=Who())
who = [eval(Path(f'who{i}').read_text()) for i in range(4)]
for k in range(1, 5): test_eq(len({o[k] for o in who}), 4)
for e in range(3):
    steps = [[o for o in w[0] if o[0] == e and o[1]] for w in who]
    for s in zip(*steps, strict=True): assert len({i//32 for o in s for i in o[2]}) == 2, 'one half of the sorted labels in a step'
    valid = [[o[2] for o in w[0] if o[0] == e and not o[1]] for w in who]
    test_eq([i for step in zip(*valid, strict=True) for i in sorted(sum(step, []))], list(range(40)))
assert len({str([o for o in who[0][0] if o[0] == e and o[1]])[5:] for e in range(3)}) == 3

# case 64: the training set, shuffled, its last batch dropped
l = echo(ids(37), ids(8), shuffle=True, drop_last=True)
dl = l.dls.train
for kw in (dict(ds_idx=0), dict(dl=dl)):
    p,t = l.xla_get_preds(**kw); test_eq(p[:,0], torch.arange(37.)); test_eq(t[:,0], torch.arange(37.))
    assert l.dls.train is dl and dl.shuffle and dl.drop_last and dl.bs == 4

# case 67: no length
class Endless(D.IterableDataset):
    def __iter__(self): return iter(ids(37))
for bad in DataLoader((o for o in ids(37)), bs=4), D.DataLoader(Endless(), batch_size=4):
    l = quiet(Learner(DataLoaders(bad, bad), Echo(), loss_func=MSELossFlat(), opt_func=SGD))
    for call in (lambda: l.xla_fit(1), lambda: l.xla_lr_find(), lambda: l.xla_validate()):
        try: call()
        except (TypeError, ValueError) as e: assert 'length' in str(e) or 'shard(num_shards, index)' in str(e), e
        else: assert False, call

# case 49: torch's loaders, for each verb
ds = D.TensorDataset(X[:90], Y[:90])
class ByBatch(D.Sampler):
    def __len__(self): return 5
    def __iter__(self): return iter([list(range(i, i+self.k)) for i in range(0, 5*self.k, self.k)])
def torch_learner(k):
    by = ByBatch(); by.k = k
    return quiet(Learner(DataLoaders(D.DataLoader(ds, batch_size=k, sampler=D.SequentialSampler(ds)), D.DataLoader(D.Subset(ds, range(50, 87)), batch_size=k)), mlp(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1, metrics=accuracy)),by
set_seed(3); l,_ = torch_learner(4); set_seed(3); r,by = torch_learner(16)
a,b = [f(num_it=12, show_plot=False) for f in (l.xla_lr_find, r.lr_find)]; test_close(a, b, 1e-6)
l.xla_fit(2); r.opt = None; r.fit(2); assert rel(l, r) < 1e-5; test_close(l.recorder.values, r.recorder.values, 1e-5)
for u,v in zip(l.xla_get_preds(dl=l.dls.valid), r.get_preds(dl=r.dls.valid)): test_close(u, v, 1e-5); test_eq(len(u), 37)

# case 68: outputs whose size depends on the padding of the batch
from fastai.text.all import TensorText, pad_input
class Long(Module):
    def __init__(self): self.w = nn.Parameter(torch.ones(1))
    def forward(self, x): return x.float()[...,None]*self.w
for lens in ([3]*8+[5], [3]*8+[5]*8, [3]*8+[5]*3, [3]*9, list(range(2,15))):   # one core has the last sample; all have both lengths; some; one length; all differ
    docs = [(TensorText(torch.arange(1, k+1)), TensorCategory(k%2)) for k in lens]
    def long(bs): return quiet(Learner(DataLoaders(*[TfmdDL(docs, bs=bs, before_batch=pad_input, num_workers=0, drop_last=False) for _ in range(2)], device='cpu'), Long(), loss_func=lambda p,t: p.mean(), opt_func=SGD))
    (p,t),(q,u) = long(2).xla_get_preds(),long(8).get_preds()
    test_eq(type(p), type(q)); test_eq(len(p), len(lens)); test_eq(t, u)
    for a,b in zip(p, q): test_close(a, b, 1e-6); test_eq(a.shape, b.shape)
''')

def test_no_validation_and_the_end_of_a_script(tmp_path):
    "Case 52: only data to train on; no columns for what there isn't, and the process ends by itself at once"
    run_code(START + f'''
emulate_cores(4)
dls = DataLoaders(DataLoader(items[:64], bs=4, shuffle=True, num_workers=0), device='cpu')
learn = Learner(dls, mlp(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1, metrics=accuracy)
rows = []
learn.logger = rows.append
learn.remove_cb(ProgressCallback)
learn.xla_fit(2)
assert learn.recorder.metric_names == ['epoch', 'train_loss', 'time'] and [len(o) for o in rows] == [3,3] and learn.recorder.valid_metrics and 'metrics' not in vars(learn.recorder) and len(learn.metrics) == 1, (learn.recorder.metric_names, rows)
Path({str(tmp_path/'end')!r}).write_text(str(time.time()))
''', timeout=60)
    assert time.time()-float((tmp_path/'end').read_text()) < 10

def test_whole_notebook(tmp_path):
    "Case 59: a notebook from its first cell to its last, with what it defines, the finder, a cycle twice, results and predictions"
    notebook([START + 'emulate_cores(2)', """
        from fastai.vision.all import *
        def load(i): return PILImageBW.create(np.uint8(digits.images[i]*15))
        def label(i): return int(digits.target[i])
        class Flat(Module):
            def __init__(self): self.lin,self.act = nn.Linear(64, 10),lambda x: x*2
            def forward(self, x): return self.act(self.lin(x.flatten(1)))
        def wrong(preds, targs): return (preds.argmax(-1) != targs).float().mean()
        def make(bs):
            set_seed(4)
            dls = DataBlock((ImageBlock(PILImageBW), CategoryBlock), get_x=load, get_y=label, splitter=IndexSplitter(list(range(200, 261)))).dataloaders(list(range(261)), bs=bs, num_workers=0, device='cpu')
            return Learner(dls, Flat(), loss_func=CrossEntropyLossFlat(), metrics=wrong, path='.')
        learn,ref = make(8),make(16)""", 'learn.xla_lr_find()', 'learn.xla_fit_one_cycle(2, 3e-3)', 'learn.xla_fit_one_cycle(2, 3e-3)', 'learn.show_results(max_n=4)', """
        p,t = learn.xla_get_preds()
        for a,b in zip((p, t), learn.get_preds(), strict=True): assert torch.allclose(a, b, atol=1e-5) and len(a) == 61
        from fastai.interpret import ClassificationInterpretation
        ClassificationInterpretation.from_learner(learn).confusion_matrix()
        learn.predict(load(5))
        for o in range(2): ref.dls.train.rng.seed(o); learn.dls.train.rng.seed(o); ref.fit_one_cycle(1, 1e-3) if o else None
        untouched()
        print([learn.recorder.metric_names, learn.recorder.values[-1][-1]])"""], """
    assert [o['output_type'] for o in outs[2] if 'image/png' in o.get('data', {})] == ['display_data'] and 'SuggestedLRs' in str(outs[2])
    for i in (3, 4):
        assert streams(outs[i]) == [('stdout', '2 cores x bs 8 = 16 a step, 12 steps an epoch\\n')], streams(outs[i])
        table = tables([o['data'] for o in outs[i] if 'data' in o])
        assert len(table) == 1 and table[0][0] == ['epoch', 'train_loss', 'valid_loss', 'wrong', 'time'] and [r[0] for r in table[0][1:]] == ['0', '1'], table
    second = float(table[0][-1][3])
    assert second < .5, second
    assert any('image/png' in o.get('data', {}) for o in outs[5])
    """, tmp_path, timeout=150)
