"Losses, BatchNorm, padding, random numbers and awkward sizes on several cores"
from helpers import run_code
from test_loaders import SETUP

def run(code, n=4, **kw): return run_code(SETUP.replace('N;', f'{n};', 1) + code, timeout=240, **kw)

DATA = '''
set_seed(0)
X = torch.randn(120, 6); Y = (X[:,0]*2 + X[:,1] + torch.randn(120)*.3 > 0).long()
def dls(bs, n_train=64, n_valid=37, drop=False, shuffle=True, x=X, y=Y):
    ds = list(zip(x, y))
    return DataLoaders(DataLoader(ds[:n_train], bs=bs, shuffle=shuffle, drop_last=drop), DataLoader(ds[n_train:n_train+n_valid], bs=bs), device='cpu')
def mlp(bn=False): return nn.Sequential(nn.Linear(6,8), *([nn.BatchNorm1d(8)] if bn else []), nn.ReLU(), nn.Linear(8,2))
'''

def test_losses_and_ragged_batches():
    "With a short last batch, whatever the loss: the weights, and the losses that are shown, of one core (case 25)"
    run(DATA + '''
w = torch.tensor([.2,.8])
class Own(nn.Module):
    "A buffer, a parameter, and no `reduction`"
    def __init__(self): super().__init__(); self.register_buffer('w', w.clone()); self.scale = nn.Parameter(torch.tensor(1.5))
    def forward(self, p, t): return (F.cross_entropy(p, t, reduction='none')*self.w[t]).mean()*self.scale
def mixed(bs, n): return Learner(dls(bs, n), mlp(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1)
losses = dict(plain=CrossEntropyLossFlat, weight=partial(CrossEntropyLossFlat, weight=w), torch_weight=partial(nn.CrossEntropyLoss, weight=w), ignore=partial(CrossEntropyLossFlat, ignore_index=1),
              focal=partial(FocalLossFlat, weight=w), smooth=LabelSmoothingCrossEntropyFlat, function=lambda: F.cross_entropy, partial=lambda: partial(F.cross_entropy, weight=w),
              own=Own, sum=partial(nn.CrossEntropyLoss, reduction='sum'), anonymous=lambda: lambda p,t: (F.cross_entropy(p, t, reduction='none')**2).mean())
for name,lf in losses.items():
    for size in (64, 70, 66, 49):   # even; 2 of 4 cores short; cores with one sample and with none
        if name == 'ignore' and size in (66, 49): continue   # a batch with nothing but ignored targets: 0/0, here as there
        same(f'{name} {size}', lambda bs: Learner(dls(bs, size), mlp(), loss_func=lf(), opt_func=SGD, lr=.001 if name == 'sum' else .1, metrics=accuracy), epochs=1)
# tensors of the loss are where they were
lf = FocalLossFlat(weight=w); l = Learner(dls(4), mlp(), loss_func=lf, opt_func=SGD); l.remove_cb(ProgressCallback)
with l.no_logging(): l.xla_fit(1, .1)
test_eq(lf.func.weight.device.type, 'cpu')
l.get_preds(with_loss=True)
with l.no_logging(), l.xla_ctx(): l.fit(1, .1); xp = l.get_preds(with_loss=True)
test_eq(lf.func.weight.device.type, 'cpu'); test_close(xp[2], l.get_preds(with_loss=True)[2], 1e-5)
''')

def test_batchnorm():
    "Synchronized: one core's numbers. Not synchronized: one set of running statistics, that validation used and the caller gets (case 39)"
    run(DATA + '''
for size in (64, 70):
    same(f'sync_bn {size}', lambda bs: Learner(dls(bs, size), mlp(bn=True), loss_func=CrossEntropyLossFlat(), opt_func=partial(SGD, mom=.9), lr=.1, metrics=accuracy), sync_bn=True)
same('sync_bn, a loss without reduction', lambda bs: Learner(dls(bs, 70), mlp(bn=True), loss_func=lambda p,t: (F.cross_entropy(p, t, reduction='none')**2).mean(), opt_func=SGD, lr=.1), sync_bn=True)

# each core sees inputs around another mean
x = X.clone()
for r in range(4): x[r::4] += 3*r
class Buffers(Callback):
    order = 70
    def after_epoch(self):
        from fastai_xla_extensions.core import ordinal
        (self.where/f'{ordinal()}').write_text(repr([b.tolist() for b in self.learn.model.buffers()]))
import tempfile
where = Path(tempfile.mkdtemp())
cb = Buffers(); cb.where = where
l = Learner(dls(4, x=x, shuffle=False), mlp(bn=True), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.01, metrics=[accuracy, F1Score()])
l.remove_cb(ProgressCallback)
with l.no_logging(): l.xla_fit(2, cbs=cb)
assert len({f.read_text() for f in where.iterdir()}) == 1 and len(list(where.iterdir())) == 4
test_eq(repr([b.tolist() for b in l.model.buffers()]), (where/'0').read_text())
test_eq({type(m) for m in l.model}, {nn.Linear, nn.BatchNorm1d, nn.ReLU})
logged = l.final_record[1:]; test_close(l.validate(), logged, 1e-5)
shutil.rmtree(where)
''')

def test_static_shapes():
    "A short last batch compiles nothing after the first batches: on one core in training and validation, on several too"
    run(DATA + '''
class Compiles(Callback):
    order = 100
    def before_fit(self): self.counts = []
    def after_batch(self): self._note()
    def _note(self):
        import torch_xla.debug.metrics as met
        self.counts.append((self.training, (met.metric_data('CompileTime') or [0])[0]))
for cores in (4, 1):
    cb = Compiles()
    l = Learner(dls(4, 90, 30), mlp(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1, metrics=accuracy); l.remove_cb(ProgressCallback)
    with l.no_logging(): l.xla_fit(3, cbs=cb, num_cores=cores)
    steps = len(cb.counts)//3
    train = [o for o in cb.counts if o[0]]; n_train = len(train)//3
    print(cores, 'cores', cb.counts)
    assert n_train == -(-90//(4*cores))
    assert train[n_train-1][1] == train[3][1]      # the short one is like those before it
    valid = [o for o in cb.counts if not o[0]]; n_valid = len(valid)//3
    assert valid[n_valid-1][1] == valid[n_valid-2][1] or n_valid == 2 and cores == 4
    assert cb.counts[-1][1] == cb.counts[steps][1]  # and nothing after the first epoch
''')

def test_random_numbers():
    "Orders and augmentation: repeat with the seed, differ between epochs and between cores; nothing shared between cores that are threads (cases 26, 48)"
    run(DATA + '''
import tempfile, random
from fastai_xla_extensions.core import ordinal
class Noise(Transform):
    def encodes(self, x:TensorImage): return x + torch.randn(1)*.1 + np.random.rand()*.1 + random.random()*.1
class Seen(Callback):
    "What each core is given"
    def __init__(self, where): self.where = where
    def before_fit(self): self.rows = []
    def before_batch(self):
        if self.training: self.rows.append((self.epoch, self.learn.yb[0].cpu().tolist(), round(self.learn.xb[0].sum().item(), 4)))
        assert self.learn.cbs[-1].learn is self.learn or self.learn in [c.learn for c in self.learn.cbs]
    def after_fit(self): (self.where/f'{ordinal()}').write_text(repr((self.rows, [o for o in (id(self.learn), id(self), id(self.learn.model), id(self.learn.opt))])))
def one(seed, workers=0):
    set_seed(5)
    ds = [(TensorImage(torch.zeros(1,2,2)), TensorCategory(torch.tensor(i))) for i in range(40)]
    d = DataLoaders(TfmdDL(ds, bs=2, shuffle=True, num_workers=workers, after_item=[Noise()], after_batch=[Noise()], drop_last=True), TfmdDL(ds[:8], bs=2, num_workers=workers), device='cpu')
    class M(Module):
        def __init__(self): self.w = nn.Parameter(torch.zeros(1))
        def forward(self, x): return (x.mean((1,2,3))*self.w)[:,None]
    l = Learner(d, M(), loss_func=lambda p,t: ((p.squeeze(1)-t/40)**2).mean(), opt_func=SGD, lr=.1); l.remove_cb(ProgressCallback)
    where = Path(tempfile.mkdtemp())
    with l.no_logging(): l.xla_fit(2, seed=seed, cbs=Seen(where))
    res = [eval((where/f'{r}').read_text()) for r in range(4)]
    shutil.rmtree(where)
    ids = [r[1] for r in res]
    for k in range(4): assert len({i[k] for i in ids}) == 4   # learner, callback, model and optimizer of its own on each core
    return [r[0] for r in res], l.model.w.item()
for workers in (0, 8):
    (a,wa),(b,wb),(c,wc) = one(1, workers),one(1, workers),one(2, workers)
    assert a == b and wa == wb, 'the same seed'
    assert a != c and wa != wc
    for ep in (0, 1): test_eq(sorted(i for r in a for e,ids,_ in r if e == ep for i in ids), list(range(40)))   # every sample once
    orders = [[i for e,ids,_ in a[0] if e == ep for i in ids] for ep in (0,1)]
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])
    first = [r[0][2] for r in a]
    assert len(set(first)) == 4, first      # other noise on each core
''')

def test_awkward_sizes():
    "Few items, no validation, loader workers: exact, or a clear error before anything starts; nothing left running (cases 01, 37, 52)"
    run(DATA + '''
import multiprocessing
def learner(bs, n_train, n_valid, drop=False): return Learner(dls(bs, n_train, n_valid, drop), mlp(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1, metrics=accuracy)
for n_valid in (0, 1, 3, 8, 31, 33): same(f'{n_valid} to validate', lambda bs: learner(bs, 64, n_valid), epochs=1)
for n_train in (1, 3, 7): same(f'{n_train} to train on', lambda bs: learner(bs, n_train, 9))
same('bs=1', lambda bs: learner(bs, 7, 3), bs=1)
for n_train in (1, 3, 15): test_fail(lambda: learner(4, n_train, 9, drop=True).xla_fit(1), exc=ValueError, contains=f'{n_train} items')
test_fail(lambda: learner(4, 0, 9).xla_fit(1), exc=ValueError, contains='0 items')

# only a training set
l = Learner(DataLoaders(dls(4).train), mlp(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1); l.remove_cb(ProgressCallback)
rows = []; l.logger = rows.append
l.xla_fit(2)
test_eq(l.recorder.metric_names, ['epoch', 'train_loss', 'time'])
test_eq([len(r) for r in rows], [3,3])
l_train = l

# loader workers: 8 over 4 cores, and over 3 epochs, with persistent workers asked for
ds = list(zip(X, Y))
for persistent in (False, True):
    d = DataLoaders(DataLoader(ds[:64], bs=4, shuffle=True, num_workers=8, persistent_workers=persistent), DataLoader(ds[64:97], bs=4, num_workers=8, persistent_workers=persistent), device='cpu')
    l = Learner(d, mlp(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1, metrics=accuracy); l.remove_cb(ProgressCallback)
    with l.no_logging(): l.xla_fit(3)
    logged = l.final_record[1:]; test_close(l.validate(), logged, 1e-5)
from fastai.data.load import _MultiProcessingDataLoaderIter   # the loaders of the caller may keep workers, those of the cores are gone (the test's own check)
del l, d; import gc; gc.collect()
assert not multiprocessing.active_children()

# several validation sets
d = dls(4); d3 = DataLoaders(d.train, d.valid, DataLoader(list(zip(X[:21], Y[:21])), bs=4), device='cpu')
l = Learner(d3, mlp(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1, metrics=accuracy); l.remove_cb(ProgressCallback)
with l.no_logging(): l.xla_fit(1)
ref = [l.validate(i) for i in (0,1,2)]
with l.xla_ctx():
    for i in (1,2): test_close(l.validate(i), ref[i], 1e-5)
    p = l.get_preds(2)
test_close(p[0], l.get_preds(2)[0], 1e-5); test_eq(p[1], Y[:21])
with l_train.xla_ctx(): l_train.fit(1)
test_eq(l_train.recorder.metric_names, ['epoch', 'train_loss', 'time'])
''')

def test_epochs_and_reading_loaders():
    "The same number of batches in every epoch, also when a callback reads the loader itself (case 53)"
    run(DATA + '''
class Count(Callback):
    def before_fit(self): self.n = []
    def before_epoch(self): self.n.append([0,0])
    def before_batch(self): self.n[-1][not self.training] += 1
    def after_epoch(self): assert len(list(self.learn.dls.valid)) == 10
l = Learner(dls(4), mlp(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.1); l.remove_cb(ProgressCallback)
cb = Count()
with l.no_logging():
    l.xla_fit(4, cbs=cb); test_eq(cb.n, [[4,3]]*4)
    l.xla_fit(2, cbs=cb); test_eq(cb.n, [[4,3]]*2)
''')

def test_batchnorm_on_one_core():
    "Running statistics and validation as on the CPU, with a short last batch too, and the layers as they were afterwards"
    run(DATA + '''
for size in (64, 70):
    a,b = [Learner(dls(16, size), mlp(bn=True), loss_func=CrossEntropyLossFlat(), opt_func=partial(SGD, mom=.9), lr=.1, metrics=accuracy) for _ in range(2)]
    b.model.load_state_dict(a.model.state_dict())
    for o in (a, b): o.remove_cb(ProgressCallback); o.dls.train.rng.seed(1)
    with a.no_logging(), b.no_logging():
        with a.xla_ctx(): a.fit(2)
        b.fit(2)
    for k,v in b.model.state_dict().items(): test_close(a.model.state_dict()[k], v, 1e-5)
    test_close(a.recorder.values, b.recorder.values, 1e-5)
    test_eq([type(m) for m in a.model], [type(m) for m in b.model])
    assert not any('across' in vars(m) or 'mask' in vars(m) for m in a.model)
''')
